"""Lets ``import apex`` and ``import transformer_engine`` find stand-ins, or packages that a test writes, or nothing.

The stand-ins are packages in ``stand_ins/`` with the libraries' signatures, which tests compare where a library is
installed, and compute with torch on a CPU.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_glue.backends import apex, transformer_engine

STAND_INS = Path(__file__).parent / "stand_ins"
LIBRARIES = ("apex", "amp_C", "fused_layer_norm_cuda", "transformer_engine", "transformer_engine_torch")


@contextmanager
def found_in(folder: Path) -> Iterator[None]:
    """Look for libraries in this folder first; what was imported before comes back at the end."""
    with _own_modules():
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            sys.path.remove(str(folder))


@contextmanager
def hidden() -> Iterator[None]:
    """Make the libraries absent."""
    with _own_modules():
        sys.modules.update(dict.fromkeys(LIBRARIES))  # pyright: ignore[reportArgumentType]
        yield


@contextmanager
def _own_modules() -> Iterator[None]:
    before = _forget()
    try:
        yield
    finally:
        _forget()
        sys.modules.update(before)


def _forget() -> dict[str, Any]:
    """Drop what was imported and what the backends remember of it; return the modules."""
    importlib.invalidate_caches()
    for module in (apex, transformer_engine):
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in LIBRARIES}
