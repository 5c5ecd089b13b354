"""Triton kernels for the index work of a mixture-of-experts layer: grouping, permutation, router.

Each file holds the kernels of one role and what launches them. Importing this package loads nothing; its modules with
kernels import Triton and are loaded by the registry, when ``availability.py`` finds that they can run.
"""
