"""Floor 4: recompute of blocks, and moving their inputs off the device and back."""
