"""Grouped products on a CPU: one product of oneDNN per expert, forward and for each gradient.

On a CPU torch's ``grouped_mm`` is such a loop too, over MKL's products. Here each core takes some experts whole. There
is no device to wait for: the offsets are host memory.

oneDNN compiles a kernel for every shape and keeps the last thousand or so. An expert has another number of rows in
every step, so without care kernels are compiled all the time and take hundreds of MiB. Numbers of rows are therefore
rounded up to a few per octave: a product also multiplies some rows of the experts behind it, which are cut off, and for
the gradient of a weight rows are padded with zeros.

Shape suffixes: R received rows, r rows of one expert, D input width, F output width, e local experts; M, N, K of a
product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_glue.backends.core_pool import CorePool, shared_pool
from megatron_glue.ops.matmul import MatMul, is_asked_for

_SIZES_PER_OCTAVE = 4
_SMALLEST_STEP = 32


class GroupedMMOnCpu:
    """Expert by expert. See :class:`megatron_glue.backends.grouped_mm.GroupedMM`.

    Args:
        matmul: Computes the products.
    """

    def __init__(self, matmul: MatMul) -> None:
        self._matmul = matmul
        self._pool = shared_pool()

    def __call__(self, x_RD: Tensor, weight_eDF: Tensor, offsets_e: Tensor, *, zero_tail: bool = False) -> Tensor:
        """See :class:`megatron_glue.backends.grouped_mm.GroupedMM`; the tail is zeros, asked for or not."""
        return _GroupedMM.apply(x_RD, weight_eDF, offsets_e, self._matmul, self._pool)


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


class _Groups:
    """Rows of each expert that has any.

    Args:
        offsets_e: End row of each expert, host memory.
    """

    def __init__(self, offsets_e: Tensor) -> None:
        ends = [int(end) for end in offsets_e.numpy()]
        starts = [0, *ends[:-1]]
        self._num_rows = ends[-1]
        self._rows = [(e, start, end) for e, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]
        self._idle = [e for e, (start, end) in enumerate(zip(starts, ends, strict=True)) if end == start]

    def multiply(
        self, x_RK: Tensor, weight_eKN: Tensor, product: Callable[[Tensor, Tensor], Tensor], pool: CorePool
    ) -> Tensor:
        """Each expert's rows times its weight, [R, N]; zeros past the last offset."""
        out_RN = x_RK.new_empty(x_RK.shape[0], weight_eKN.shape[2])
        out_RN[self._num_rows :] = 0.0

        def multiply_one(e: int, start: int, end: int) -> None:
            padded_rN = product(x_RK[start : self._stop(start, end)], weight_eKN[e])
            out_RN[start:end] = padded_rN[: end - start]

        self._for_each(multiply_one, pool)
        return out_RN

    def gradients(self, x_RD: Tensor, grad_RF: Tensor, weight_eDF: Tensor, matmul: MatMul, pool: CorePool) -> Tensor:
        """Each expert's x^T grad, in the memory order of the weights; zeros for an expert without rows."""
        grad_eDF = torch.empty_like(weight_eDF)
        for e in self._idle:
            grad_eDF[e].zero_()

        def multiply_one(e: int, start: int, end: int) -> None:
            x_rD, grad_rF = x_RD[start:end], grad_RF[start:end]
            if x_rD.shape[1] <= grad_rF.shape[1]:
                grad_eDF[e].copy_(matmul.nn(_padded_columns(x_rD), _padded_rows(grad_rF)))
            else:
                grad_eDF[e].t().copy_(matmul.nn(_padded_columns(grad_rF), _padded_rows(x_rD)))

        self._for_each(multiply_one, pool)
        return grad_eDF

    def _for_each(self, function: Callable[[int, int, int], None], pool: CorePool) -> None:
        pool.run([partial(function, *group) for group in self._rows], [end - start for _, start, end in self._rows])

    def _stop(self, start: int, end: int) -> int:
        """The end of an expert's padded rows; its own where padding would pass the last offset."""
        stop = start + padded_rows(end - start)
        return stop if stop <= self._num_rows else end


def _padded_columns(rows_rX: Tensor) -> Tensor:
    """Rows as columns, [X, padded], zeros behind them."""
    columns_Xr = rows_rX.new_zeros(rows_rX.shape[1], padded_rows(rows_rX.shape[0]))
    columns_Xr[:, : rows_rX.shape[0]] = rows_rX.t()
    return columns_Xr


def _padded_rows(rows_rX: Tensor) -> Tensor:
    """Rows, [padded, X], zeros behind them: zeros times a stranger's infinity would be NaN."""
    num_missing = padded_rows(rows_rX.shape[0]) - rows_rX.shape[0]
    return F.pad(rows_rX, (0, 0, 0, num_missing)) if num_missing else rows_rX


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, weight_eDF: Tensor, offsets_e: Tensor, matmul: MatMul, pool: CorePool
    ) -> Tensor:
        ctx.matmul, ctx.pool = matmul, pool
        ctx.save_for_backward(x_RD, weight_eDF, offsets_e)
        return _Groups(offsets_e).multiply(x_RD, weight_eDF, matmul.nn, pool)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_eDF, offsets_e = ctx.saved_tensors
        (grad_RF,) = grad_outputs
        groups = _Groups(offsets_e)
        grad_x_RD = grad_weight_eDF = None
        if is_asked_for(ctx, 0):
            grad_x_RD = groups.multiply(grad_RF, weight_eDF.transpose(1, 2), ctx.matmul.nn, ctx.pool)
        if is_asked_for(ctx, 1):
            grad_weight_eDF = groups.gradients(x_RD, grad_RF, weight_eDF, ctx.matmul, ctx.pool)
        return grad_x_RD, grad_weight_eDF, None, None, None
