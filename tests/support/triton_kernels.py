"""Where the Triton kernels run in this session, and tensors whose rows stand more than 2^31 elements apart."""

from __future__ import annotations

import importlib.util
import mmap

import pytest
import torch
from torch import Tensor

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's number where Python does not name it."""

ROW_STRIDE = 2**30 + 16
"""Below 2^31, so that it reaches a kernel as an int32; twice it is above."""


def kernel_device() -> torch.device:
    """The GPU that kernels are compiled for, or the CPU on which they are interpreted; skips where they cannot run."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    from megatron_glue.backends.triton.availability import is_interpreted

    if torch.cuda.is_available():
        return torch.device("cuda")
    if not is_interpreted():
        pytest.skip("Triton was imported before tests/conftest.py could turn on its interpreter")
    return torch.device("cpu")


def far_rows(rows_RD: Tensor) -> Tensor:
    """Return a copy of at most three rows that stand ROW_STRIDE elements apart; nothing else of the memory is touched.

    On a CPU as many elements lie before the first row as behind it: an offset that wraps in 32 bits reads zeros from
    there instead of killing the process.
    """
    num_rows, width = rows_RD.shape
    assert num_rows <= 3, "the third row is the first that needs 64 bits"
    span = 2 * ROW_STRIDE + width
    if rows_RD.device.type == "cuda":
        try:
            storage, start = torch.zeros(span, dtype=rows_RD.dtype, device="cuda"), 0
        except torch.OutOfMemoryError:
            pytest.skip(f"the GPU has no room for {span} elements")
    else:
        try:
            memory = mmap.mmap(-1, 2 * span * rows_RD.element_size(), mmap.MAP_PRIVATE | MAP_NORESERVE)
        except OSError as error:
            pytest.skip(f"the system reserves no such address range: {error}")
        storage, start = torch.frombuffer(memory, dtype=rows_RD.dtype), span
    far_RD = storage.as_strided((num_rows, width), (ROW_STRIDE, 1), start)
    far_RD.copy_(rows_RD)
    return far_RD
