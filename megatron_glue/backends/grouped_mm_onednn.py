"""Grouped products on a CPU: one product of ``backends/matmul_onednn.py`` per expert, forward and for each gradient.

On a CPU torch's ``grouped_mm`` is such a loop too, over MKL's products. There is no device to wait for: the offsets are
host memory.

Shape suffixes: R received rows, D input width, F output width, e local experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_glue.ops.matmul import MatMul


class GroupedMMOnCpu:
    """Expert by expert. See :class:`megatron_glue.backends.grouped_mm.GroupedMM`.

    Args:
        matmul: Computes the products.
    """

    def __init__(self, matmul: MatMul) -> None:
        self._matmul = matmul

    def __call__(self, x_RD: Tensor, weight_eDF: Tensor, offsets_e: Tensor, *, zero_tail: bool = False) -> Tensor:
        """See :class:`megatron_glue.backends.grouped_mm.GroupedMM`; the tail is zeros, asked for or not."""
        return _GroupedMM.apply(x_RD, weight_eDF, offsets_e, self._matmul)


def _groups(offsets_e: Tensor) -> list[tuple[int, slice]]:
    """Each expert that has rows, and its rows."""
    ends = offsets_e.numpy()
    starts = [0, *ends[:-1]]
    return [(e, slice(start, end)) for e, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]


def _joined(parts: list[Tensor], num_rows: int, width: int, like: Tensor) -> Tensor:
    """The experts' rows back to back, and zeros behind them."""
    num_missing = num_rows - sum(part.shape[0] for part in parts)
    if num_missing or not parts:
        parts = [*parts, like.new_zeros(num_missing, width)]
    return torch.cat(parts)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_eDF: Tensor, offsets_e: Tensor, matmul: MatMul) -> Tensor:
        ctx.matmul = matmul
        ctx.save_for_backward(x_RD, weight_eDF, offsets_e)
        parts = [matmul.nn(x_RD[rows], weight_eDF[e]) for e, rows in _groups(offsets_e)]
        return _joined(parts, x_RD.shape[0], weight_eDF.shape[2], x_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        matmul: MatMul = ctx.matmul
        x_RD, weight_eDF, offsets_e = ctx.saved_tensors
        grad_RF, groups = grad_outputs[0], _groups(offsets_e)
        grad_x_RD = grad_weight_eDF = None
        if ctx.needs_input_grad[0]:
            parts = [matmul.nt(grad_RF[rows], weight_eDF[e]) for e, rows in groups]
            grad_x_RD = _joined(parts, x_RD.shape[0], x_RD.shape[1], x_RD)
        if ctx.needs_input_grad[1]:
            grad_weight_eDF = _gradients_of_weights(x_RD, grad_RF, weight_eDF, groups, matmul.tn)
        return grad_x_RD, grad_weight_eDF, None, None


def _gradients_of_weights(
    x_RD: Tensor,
    grad_RF: Tensor,
    weight_eDF: Tensor,
    groups: list[tuple[int, slice]],
    product: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Stacked gradients in the memory order of the weights, zero for experts without rows."""
    grad_eDF = torch.empty_like(weight_eDF)
    is_transposed = weight_eDF.stride(1) < weight_eDF.stride(2)
    for e, rows in groups:
        if is_transposed:
            grad_eDF[e].t().copy_(product(grad_RF[rows], x_RD[rows]))
        else:
            grad_eDF[e].copy_(product(x_RD[rows], grad_RF[rows]))
    for e in set(range(weight_eDF.shape[0])) - {e for e, _ in groups}:
        grad_eDF[e].zero_()
    return grad_eDF
