"""Tensor and sequence parallelism: products whose weight is split over ranks, and the exchanges around them.

A layer's first product is split by columns of its result (rows of its weight), its last one by what it sums over, so
that one exchange at either end of the layer is enough (Shoeybi et al. 2019, "Megatron-LM"). Without sequence
parallelism every rank holds the whole residual stream [T, D], and the exchanges are all-reduces: one in forward, one in
backward. With it each rank holds T / P rows of the stream, norms and dropout work on those alone, and the same bytes
travel as a gather and a reduce-scatter (Korthikanti et al. 2022, "Reducing Activation Recomputation").

Exchanges in backward run beside products that do not need them. A gathered input is not kept for backward, its own rows
are: it is gathered once more while the gradient of the input is computed.

Stands inside layers, on both sides of attention and of the feed-forward. ``None`` in place of a
:class:`TensorParallel` means one rank: plain products.

Shape suffixes: T tokens, S rows on this rank (T / P with sequence parallelism, else T), D model, O width of the
product on this rank, I width summed over on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_glue.ops.matmul import TORCH_MATMUL, MatMul, is_asked_for, linear
from megatron_glue.parallel.collectives import (
    Pending,
    start_all_gather_rows,
    start_all_reduce_,
    start_reduce_scatter_rows,
)
from megatron_glue.parallel.mesh import ParallelMesh


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """The ranks that split each layer's weights, as layers see them.

    Attributes:
        group: These ranks.
        rank: This rank among them.
        size: Their number, above 1.
        sequence_parallel: Whether each holds only its rows of the residual stream.
        kv_copies: How many of them hold the same kv head; 1 unless there are fewer heads than ranks.
    """

    group: ProcessGroup
    rank: int
    size: int
    sequence_parallel: bool
    kv_copies: int = 1

    @classmethod
    def from_mesh(cls, mesh: ParallelMesh) -> TensorParallel | None:
        """Take what layers need from the run's mesh; ``None`` if nothing is split."""
        if mesh.tp_group is None:
            return None
        return cls(mesh.tp_group, mesh.tp_rank, mesh.tp_size, mesh.sequence_parallel, mesh.kv_copies)


def column_linear(
    x_SD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, tp: TensorParallel | None, matmul: MatMul = TORCH_MATMUL
) -> Tensor:
    """Multiply the residual stream by this rank's rows of a weight.

    Args:
        x_SD: This rank's rows of the stream (sequence parallelism), else all of them, the same on every rank.
        weight_OD: This rank's rows of the weight.
        bias_O: Their biases.
        tp: The ranks.
        matmul: Computes the products.

    Returns:
        [T, O]: all rows, this rank's columns. In backward the gradients of all ranks' columns are summed into that of
        ``x_SD``; weight and bias get the whole gradient of their rows.
    """
    if tp is None:
        return linear(x_SD, weight_OD, bias_O, matmul)
    return _ColumnLinear.apply(x_SD, weight_OD, bias_O, tp, matmul)


def row_linear(
    x_TI: Tensor, weight_DI: Tensor, bias_D: Tensor | None, tp: TensorParallel | None, matmul: MatMul = TORCH_MATMUL
) -> Tensor:
    """Multiply this rank's columns by its columns of a weight, and sum over ranks into the residual stream.

    Args:
        x_TI: All rows, this rank's columns.
        weight_DI: This rank's columns of the weight.
        bias_D: Bias of the sum, the same on every rank; it is added once. With sequence parallelism its gradient is
            that of this rank's rows alone.
        tp: The ranks.
        matmul: Computes the products.

    Returns:
        [S, D]: this rank's rows of the sum (sequence parallelism), else all of them, bit-equal on every rank.
    """
    if tp is None:
        return linear(x_TI, weight_DI, bias_D, matmul)
    # Two operators: a recompute that needs no more than their inputs stops before the product and the exchange.
    out_SD = reduce_rows(linear(x_TI, weight_DI, None, matmul), tp)
    return out_SD if bias_D is None else out_SD + bias_D


def reduce_rows(partial_TD: Tensor, tp: TensorParallel | None) -> Tensor:
    """Sum partial rows of all ranks into the residual stream.

    Args:
        partial_TD: All rows, each rank's own share of the sum; no leaf. It may be overwritten.
        tp: The ranks; ``None`` returns ``partial_TD`` itself.

    Returns:
        [S, D] as for :func:`row_linear`. Each rank's share gets the gradient of all rows.
    """
    if tp is None:
        return partial_TD
    return _ReduceRows.apply(partial_TD, tp)


@torch.no_grad()
def gather_rows(x_SD: Tensor, tp: TensorParallel | None) -> Tensor:
    """Return all rows of the residual stream, without a gradient.

    Args:
        x_SD: What this rank holds of it.
        tp: The ranks.

    Returns:
        [T, D].
    """
    if tp is None or not tp.sequence_parallel:
        return x_SD.detach()
    return start_all_gather_rows(x_SD, tp.group).wait()


def start_sum_into_stream(partial_TD: Tensor, tp: TensorParallel) -> Pending:
    """Start to sum shares of a tensor over ranks, into the form that the residual stream has.

    Args:
        partial_TD: All rows, each rank's own share of the sum; it may be overwritten.
        tp: The ranks.

    Returns:
        [S, D] to come.
    """
    if tp.sequence_parallel:
        return start_reduce_scatter_rows(partial_TD, tp.group)
    return start_all_reduce_(partial_TD.contiguous(), tp.group)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_SD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, tp: TensorParallel, matmul: MatMul
    ) -> Tensor:
        ctx.tp, ctx.matmul = tp, matmul
        ctx.save_for_backward(x_SD, weight_OD)
        return matmul.nt(gather_rows(x_SD, tp), weight_OD, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        tp: TensorParallel = ctx.tp
        matmul: MatMul = ctx.matmul
        (grad_TO,) = grad_outputs
        x_SD, weight_OD = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = (is_asked_for(ctx, index) for index in range(3))
        # Each exchange starts before a product that it runs beside: the gather before grad W, the sum before grad^T x.
        gathering = start_all_gather_rows(x_SD, tp.group) if needs_weight and tp.sequence_parallel else None
        summing = start_sum_into_stream(matmul.nn(grad_TO, weight_OD), tp) if needs_x else None
        grad_bias_O = grad_TO.sum(0) if needs_bias else None
        grad_weight_OD = None
        if needs_weight:
            grad_weight_OD = matmul.tn(grad_TO, x_SD if gathering is None else gathering.wait())
        return None if summing is None else summing.wait(), grad_weight_OD, grad_bias_O, None, None


class _ReduceRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_TD: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        if tp.sequence_parallel:
            return start_reduce_scatter_rows(partial_TD, tp.group).wait()
        ctx.mark_dirty(partial_TD)
        return start_all_reduce_(partial_TD, tp.group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return gather_rows(grad_outputs[0], ctx.tp), None
