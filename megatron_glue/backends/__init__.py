"""Floor 3: the kernels behind each role, and the table that chooses between them."""
