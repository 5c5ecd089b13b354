"""Named ranges on the timelines of profilers: torch.profiler, and Nsight Systems through NVTX.

A range is put around a function from outside, by replacing the function on its object: code on the hot path knows
nothing of ranges and pays nothing for them while they are off. Which functions get which names is
``training/phases.py``'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.profiler import record_function


@contextmanager
def named_range(name: str, *, use_nvtx: bool = False) -> Iterator[None]:
    """Name what runs inside.

    Args:
        name: Shown by torch.profiler.
        use_nvtx: Push an NVTX range too, for Nsight Systems; needs a CUDA build of torch.
    """
    with record_function(name):
        if not use_nvtx:
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def put_range(owner: Any, method: str, name: str, *, use_nvtx: bool = False) -> None:
    """Name every later call of one object's method.

    Args:
        owner: A module or any object with attributes; other objects of its class are left alone.
        method: The method.
        name: Of the range.
        use_nvtx: See :func:`named_range`.
    """
    function: Callable[..., Any] = getattr(owner, method)

    @wraps(function)
    def in_range(*args: Any, **kwargs: Any) -> Any:
        with named_range(name, use_nvtx=use_nvtx):
            return function(*args, **kwargs)

    setattr(owner, method, in_range)
