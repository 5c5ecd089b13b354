"""Stands in for the compiled module of apex that its optimizers need."""
