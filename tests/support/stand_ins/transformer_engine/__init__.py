"""Stands in for Transformer Engine on a CPU: the signatures of its releases 2.10 to 2.19, computed by torch."""

__version__ = "2.10.0+stand.in"
