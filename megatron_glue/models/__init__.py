"""Floor 6: whole models, built and parallelised."""
