"""Stands in for NVIDIA apex on a CPU: the signatures of its source, computed by torch."""

from . import normalization, optimizers

__all__ = ["normalization", "optimizers"]
