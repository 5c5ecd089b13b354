"""Floor 2: the mesh of ranks, collectives, and the engines that reduce gradients."""
