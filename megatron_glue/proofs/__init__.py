"""Experiments that show what a layout, a resume or a kill may not change; the tools run them, training never does."""
