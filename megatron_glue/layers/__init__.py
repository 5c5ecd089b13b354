"""Floor 4: the decoder block and what attention must know about a packed batch."""
