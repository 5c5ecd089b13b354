"""Stands in for ``apex.normalization``."""
