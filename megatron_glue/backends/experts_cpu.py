"""The feed-forward networks of a layer's experts on a CPU, as one function with a backward of its own.

Each expert goes through both products and the nonlinearity in one go, on one core: cores meet twice per layer and step
instead of six times, the nonlinearity finds its rows in the cache, and its result is not kept: backward computes it
again from what goes in (one pass of some percent of a product's time, for a third of the memory).

Called through ``grouped_mm_cpu.py``; where the activation manager rebuilds or keeps what lies between the products,
the experts call the grouped products one by one instead.

Shape suffixes: R received rows, r rows of one expert, D model, F ffn, e local experts, G fused gate/up width (2F for
SwiGLU, F for GELU).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_glue.backends.core_pool import CorePool
from megatron_glue.backends.expert_products import CpuProducts, ExpertRows
from megatron_glue.backends.grouped_mm import Activation
from megatron_glue.ops.matmul import is_asked_for


def feed_forward_on_cpu(
    x_RD: Tensor,
    weights: tuple[Tensor, Tensor],
    offsets_e: Tensor,
    activation: Activation,
    products: CpuProducts,
    pool: CorePool,
) -> Tensor:
    """Compute all experts.

    Args:
        x_RD: Rows in expert order.
        weights: Gate and up [e, G, D], and down [e, D, F], in the dtype of the rows.
        offsets_e: Integer end row of each expert, host memory.
        activation: Between the two products.
        products: Multiplies.
        pool: Shares experts out among cores.

    Returns:
        [R, D]; zeros past the last offset, as in the gradient of ``x_RD``.
    """
    return _FeedForward.apply(x_RD, *weights, offsets_e, activation, products, pool)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        gate_up_eGD: Tensor,
        down_eDF: Tensor,
        offsets_e: Tensor,
        activation: Activation,
        products: CpuProducts,
        pool: CorePool,
    ) -> Tensor:
        experts = ExpertRows(offsets_e)
        out_RD = torch.empty_like(x_RD)
        out_RD[experts.num_rows :] = 0.0
        # One memory for all experts where rows are taken as they are; else each expert's as its product returned it.
        kept_RG = None if products.rounds_rows else x_RD.new_empty(x_RD.shape[0], gate_up_eGD.shape[1])
        kept: dict[int, Tensor] = {}

        def compute_one(e: int, start: int, end: int) -> None:
            gate_up_rG = products.nn(
                products.rows(x_RD, start, end), gate_up_eGD[e].t(), None if kept_RG is None else kept_RG[start:end]
            )
            kept[e] = gate_up_rG
            products.nn(_activate(gate_up_rG, activation), down_eDF[e].t(), out_RD[start:end])

        experts.for_each(compute_one, pool)
        ctx.activation, ctx.products, ctx.pool = activation, products, pool
        gate_ups = [kept[e] for e, _, _ in experts.groups] if kept_RG is None else [kept_RG]
        ctx.save_for_backward(x_RD, gate_up_eGD, down_eDF, offsets_e, *gate_ups)
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, gate_up_eGD, down_eDF, offsets_e, *gate_ups = ctx.saved_tensors
        (grad_RD,) = grad_outputs
        products: CpuProducts = ctx.products
        experts = ExpertRows(offsets_e)
        grad_x_RD, grad_gate_up_eGD, grad_down_eDF = (
            torch.empty_like(tensor) if is_asked_for(ctx, index) else None
            for index, tensor in enumerate((x_RD, gate_up_eGD, down_eDF))
        )
        kept = {
            e: gate_ups[index] if products.rounds_rows else gate_ups[0][start:end]
            for index, (e, start, end) in enumerate(experts.groups)
        }

        def compute_one(e: int, start: int, end: int) -> None:
            grad_rD = products.rows(grad_RD, start, end)
            hidden_rF, grad_rG = _differentiate(kept[e], products.nn(grad_rD, down_eDF[e]), ctx.activation)
            if grad_down_eDF is not None:
                products.tn(grad_rD, hidden_rF, grad_down_eDF[e])
            if grad_x_RD is not None:
                products.nn(grad_rG, gate_up_eGD[e], grad_x_RD[start:end])
            if grad_gate_up_eGD is not None:
                products.tn(grad_rG, products.rows(x_RD, start, end), grad_gate_up_eGD[e])

        experts.for_each(compute_one, ctx.pool)
        if grad_x_RD is not None:
            grad_x_RD[experts.num_rows :] = 0.0
        for grad in (grad_gate_up_eGD, grad_down_eDF):
            if grad is not None:
                for e in experts.idle:
                    grad[e].zero_()
        return grad_x_RD, grad_gate_up_eGD, grad_down_eDF, None, None, None, None


def _activate(gate_up_rG: Tensor, activation: Activation) -> Tensor:
    if activation == "gelu":
        return F.gelu(gate_up_rG, approximate="tanh")
    gate_rF, up_rF = gate_up_rG.chunk(2, dim=1)
    return F.silu(gate_rF).mul_(up_rF)


def _differentiate(gate_up_rG: Tensor, grad_rF: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return the nonlinearity's result, and the gradient of what goes into it. ``grad_rF`` is overwritten."""
    if activation == "gelu":
        grad_rG = torch.ops.aten.gelu_backward(grad_rF, gate_up_rG, approximate="tanh")
        return _activate(gate_up_rG, activation), grad_rG
    gate_rF, up_rF = gate_up_rG.chunk(2, dim=1)
    grad_rG = torch.empty_like(gate_up_rG)
    grad_gate_rF, grad_up_rF = grad_rG.chunk(2, dim=1)
    hidden_rF = F.silu(gate_rF)
    torch.mul(grad_rF, hidden_rF, out=grad_up_rF)
    torch.ops.aten.silu_backward.grad_input(grad_rF.mul_(up_rF), gate_rF, grad_input=grad_gate_rF)
    return hidden_rF.mul_(up_rF), grad_rG
