"""The data of a run."""
