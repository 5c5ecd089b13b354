"""Floor 1: pure tensor functions. They know no module, no process group and no configuration."""
