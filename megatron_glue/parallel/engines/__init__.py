"""The data-parallel engines: one process, replicated weights (DDP), sharded weights (FSDP2)."""
