"""Products of each expert's rows on a CPU, and how the experts of a layer share the cores.

``ExpertRows`` says which rows belong to which expert and runs one function per expert, each core taking some experts
whole. ``CpuProducts`` multiplies one expert's rows by the products of a :class:`MatMul`. There is no device to wait
for: the offsets are host memory.

oneDNN compiles a kernel for every shape and keeps the last thousand or so. An expert has another number of rows in
every step, so without care kernels are compiled all the time and take hundreds of MiB. For such libraries numbers of
rows are rounded up to a few per octave, with zeros behind the last row.

Used by ``grouped_mm_cpu.py`` and ``experts_cpu.py``.

Shape suffixes: R received rows, r rows of one expert (with what fills them up), X any width, e local experts; M, N, K
of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_glue.backends.core_pool import CorePool
from megatron_glue.ops.matmul import TORCH_MATMUL, MatMul

_SIZES_PER_OCTAVE = 4
_SMALLEST_STEP = 32


class ExpertRows:
    """Rows of each expert that has any.

    Args:
        offsets_e: End row of each expert, host memory.

    Attributes:
        num_rows: Rows that belong to an expert.
        groups: (expert, start, end) of each expert with rows, in order.
        idle: Experts without rows.
    """

    def __init__(self, offsets_e: Tensor) -> None:
        ends = [int(end) for end in offsets_e.numpy()]
        spans = list(zip(range(len(ends)), [0, *ends[:-1]], ends, strict=True))
        self.num_rows = ends[-1]
        self.groups = [(e, start, end) for e, start, end in spans if end > start]
        self.idle = [e for e, start, end in spans if end == start]

    def for_each(self, function: Callable[[int, int, int], None], pool: CorePool) -> None:
        """Call ``function(expert, start, end)`` for each expert with rows, in any order and on any thread."""
        pool.run([partial(function, *group) for group in self.groups], [end - start for _, start, end in self.groups])


@dataclass(frozen=True, eq=False)
class CpuProducts:
    """Products of one expert's rows, without autograd.

    Attributes:
        matmul: Computes them.
    """

    matmul: MatMul

    @property
    def rounds_rows(self) -> bool:
        """Whether numbers of rows should come in few sizes."""
        return self.matmul is not TORCH_MATMUL

    def rows(self, x_RX: Tensor, start: int, end: int) -> Tensor:
        """Some rows as the products want them: a view, or a copy with zeros behind the last one."""
        rows_rX = x_RX[start:end]
        num_missing = padded_rows(end - start) - (end - start) if self.rounds_rows else 0
        # Zeros, not neighbours: in the gradient of a weight zero times a stranger's infinity would be NaN.
        return F.pad(rows_rX, (0, 0, 0, num_missing)) if num_missing else rows_rX

    def nn(self, a_MK: Tensor, b_KN: Tensor, out_MN: Tensor | None = None) -> Tensor:
        """Return ``a @ b``.

        Args:
            a_MK: First operand.
            b_KN: Second one.
            out_MN: Where to write the first rows of the result, as many as it has; ``None``: new memory.
        """
        if not self.rounds_rows:
            return torch.mm(a_MK, b_KN, out=out_MN)
        product_MN = self.matmul.nn(a_MK, b_KN)
        return product_MN if out_MN is None else out_MN.copy_(product_MN[: out_MN.shape[0]])

    def tn(self, a_KM: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
        """Write ``a^T @ b``."""
        if not self.rounds_rows:
            torch.mm(a_KM.t(), b_KN, out=out_MN)
        elif a_KM.shape[1] <= b_KN.shape[1]:
            # oneDNN copies its first operand, so that should be the smaller one.
            out_MN.copy_(self.matmul.nn(a_KM.t(), b_KN))
        else:
            out_MN.t().copy_(self.matmul.nn(b_KN.t(), a_KM))


def padded_rows(num_rows: int) -> int:
    """Round a number of rows up to one of a few sizes.

    Args:
        num_rows: At least 1.

    Returns:
        A multiple of 32, at most a quarter above ``num_rows`` or the next multiple of 32.
    """
    octave = 1 << (num_rows - 1).bit_length()
    step = max(_SMALLEST_STEP, octave // (2 * _SIZES_PER_OCTAVE))
    return -(-num_rows // step) * step
