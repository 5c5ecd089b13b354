"""What a run will be, worked out from its configuration alone: no process group, no device, no weight."""
