"""Floor 1: what a run is configured by, where each value came from, and what combinations make sense."""
