"""Grouped products on a CPU: one product per expert, forward and for each gradient, each core taking some experts.

On a CPU torch's ``grouped_mm`` is such a loop too, of products that are each divided among the cores; most experts are
too small for that (``tools/bench/micro.py`` measures both). ``experts_cpu.py`` computes a whole feed-forward this way.

Shape suffixes: R received rows, r rows of one expert, D input width, F output width, e local experts; N, K of a
product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_glue.backends.core_pool import CorePool, shared_pool
from megatron_glue.backends.expert_products import CpuProducts, ExpertRows
from megatron_glue.backends.experts_cpu import feed_forward_on_cpu
from megatron_glue.backends.grouped_mm import Activation
from megatron_glue.ops.matmul import MatMul, is_asked_for


class GroupedMMOnCpu:
    """Expert by expert. See :class:`megatron_glue.backends.grouped_mm.GroupedMM`.

    Args:
        matmul: Computes the products.
    """

    def __init__(self, matmul: MatMul) -> None:
        self._products = CpuProducts(matmul)
        self._pool = shared_pool()

    def __call__(self, x_RD: Tensor, weight_eDF: Tensor, offsets_e: Tensor, *, zero_tail: bool = False) -> Tensor:
        """See :class:`megatron_glue.backends.grouped_mm.GroupedMM`; the tail is zeros, asked for or not."""
        return _GroupedMM.apply(x_RD, weight_eDF, offsets_e, self._products, self._pool)

    def feed_forward(
        self, x_RD: Tensor, gate_up_eGD: Tensor, down_eDF: Tensor, offsets_e: Tensor, activation: Activation
    ) -> Tensor:
        """See :class:`megatron_glue.backends.grouped_mm.FusedExperts`; the tail is zeros in both passes."""
        return feed_forward_on_cpu(x_RD, (gate_up_eGD, down_eDF), offsets_e, activation, self._products, self._pool)


def _multiply(x_RK: Tensor, weight_eKN: Tensor, experts: ExpertRows, products: CpuProducts, pool: CorePool) -> Tensor:
    """Each expert's rows times its weight, [R, N]; zeros past the last offset."""
    out_RN = x_RK.new_empty(x_RK.shape[0], weight_eKN.shape[2])
    out_RN[experts.num_rows :] = 0.0

    def multiply_one(e: int, start: int, end: int) -> None:
        products.nn(products.rows(x_RK, start, end), weight_eKN[e], out_RN[start:end])

    experts.for_each(multiply_one, pool)
    return out_RN


def _weight_gradients(
    x_RD: Tensor, grad_RF: Tensor, weight_eDF: Tensor, experts: ExpertRows, products: CpuProducts, pool: CorePool
) -> Tensor:
    """Each expert's x^T grad, in the memory order of the weights; zeros for an expert without rows."""
    grad_eDF = torch.empty_like(weight_eDF)
    for e in experts.idle:
        grad_eDF[e].zero_()

    def multiply_one(e: int, start: int, end: int) -> None:
        x_rD, grad_rF = products.rows(x_RD, start, end), products.rows(grad_RF, start, end)
        if weight_eDF[e].is_contiguous():
            products.tn(x_rD, grad_rF, grad_eDF[e])
        else:
            products.tn(grad_rF, x_rD, grad_eDF[e].t())

    experts.for_each(multiply_one, pool)
    return grad_eDF


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, weight_eDF: Tensor, offsets_e: Tensor, products: CpuProducts, pool: CorePool
    ) -> Tensor:
        ctx.products, ctx.pool = products, pool
        ctx.save_for_backward(x_RD, weight_eDF, offsets_e)
        return _multiply(x_RD, weight_eDF, ExpertRows(offsets_e), products, pool)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_eDF, offsets_e = ctx.saved_tensors
        (grad_RF,) = grad_outputs
        experts = ExpertRows(offsets_e)
        grad_x_RD = grad_weight_eDF = None
        if is_asked_for(ctx, 0):
            grad_x_RD = _multiply(grad_RF, weight_eDF.transpose(1, 2), experts, ctx.products, ctx.pool)
        if is_asked_for(ctx, 1):
            grad_weight_eDF = _weight_gradients(x_RD, grad_RF, weight_eDF, experts, ctx.products, ctx.pool)
        return grad_x_RD, grad_weight_eDF, None, None, None
