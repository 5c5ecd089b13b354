"""Floor 7: the run."""
