"""Images to batches."""
