"""Rows in a buffer with the same number of slots for every rank, so that no size depends on the routing.

``assign_slots`` finds a slot for each (token, choice) pair, ``fill_slots`` copies token rows there and ``sum_slots``
adds each token's results up again, weighted. They take the place of ``permute.py`` where the number of rows to exchange
is fixed, and like it gather in both directions and never scatter.

Empty slots hold some token's row when they leave, and anything, NaN included, when they come back: neither their
results nor their gradients are read. A pair without a slot adds nothing to its token and gets no gradient; how many
there are is counted on the device. What follows from a count above 0 is the training step's business.

Stands on both sides of a bounded exchange (``moe/dispatcher_bounded.py``). It knows no expert weight and no other rank.

Shape suffixes: T tokens, D model, K top-k, N = T*K pairs, P ranks, C slots for each rank, S = P*C slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_glue.ops.permute import dot_choices, sum_choices
from megatron_glue.types import PairSlots, TokenGroups


def assign_slots(groups: TokenGroups, capacity: int) -> PairSlots:
    """Give each rank's pairs, in expert order, its slots one after the other. Nothing is read on the host.

    Args:
        groups: Grouping of N pairs by experts of P ranks, without sentinels.
        capacity: C, at least 1.

    Returns:
        The slots: those of rank p are p*C ... p*C + C - 1.

    Raises:
        ValueError: If there is no slot.
    """
    if capacity < 1:
        raise ValueError(f"capacity={capacity}: a rank needs at least one slot")
    splits_P = groups.rank_splits_P
    ends_P = splits_P.cumsum(0)
    starts_P = ends_P - splits_P
    # Of ranks without pairs, which share their end with the one before, none is chosen.
    ranks_N = torch.searchsorted(ends_P, groups.inverse_N, right=True)
    places_N = groups.inverse_N - starts_P.index_select(0, ranks_N)
    slots_N = ranks_N * capacity + places_N.clamp(max=capacity - 1)
    places_C = torch.arange(capacity, device=splits_P.device)
    is_taken_S = (places_C < splits_P[:, None]).view(-1)
    rows_S = (starts_P[:, None] + places_C).view(-1).masked_fill(~is_taken_S, 0)
    return PairSlots(
        slots_TK=slots_N.view(-1, groups.top_k),
        is_placed_TK=(places_N < capacity).view(-1, groups.top_k),
        pairs_S=groups.order_N.index_select(0, rows_S) if groups.num_pairs else rows_S,
        is_taken_S=is_taken_S,
        num_overflowing=(splits_P - capacity).clamp(min=0).sum(),
    )


def fill_slots(x_TD: Tensor, slots: PairSlots) -> Tensor:
    """Copy token rows into their slots.

    Args:
        x_TD: [T, D] floating point.
        slots: Those of T * K pairs.

    Returns:
        [S, D]. Differentiable: the gradient of a token is the sum over its slots.
    """
    return _FillSlots.apply(x_TD, slots)


def sum_slots(y_SD: Tensor, slots: PairSlots, weights_TK: Tensor) -> Tensor:
    """Add up the results in each token's slots, weighted, in token order.

    Args:
        y_SD: [S, D]; empty slots may hold anything, NaN included.
        slots: Those of T * K pairs.
        weights_TK: [T, K] floating point; used in the dtype of ``y_SD``.

    Returns:
        [T, D] in the dtype of ``y_SD``. Differentiable with respect to rows and weights; both gradients are zero for
        empty slots and pairs without one.
    """
    return _SumSlots.apply(y_SD, weights_TK, slots)


class _FillSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, slots: PairSlots) -> Tensor:
        ctx.slots = slots
        if x_TD.shape[0] == 0:
            return x_TD.new_zeros(slots.pairs_S.shape[0], x_TD.shape[1])
        return x_TD.index_select(0, _tokens_S(slots))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        grad_SD, slots = grad_outputs[0].contiguous(), ctx.slots
        # A pair without a slot points at one that is taken, so what its weight of 0 multiplies is no garbage.
        return sum_choices(grad_SD, slots.slots_TK, slots.is_placed_TK.to(grad_SD.dtype)), None


class _SumSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, weights_TK: Tensor, slots: PairSlots) -> Tensor:
        ctx.slots, ctx.weights_dtype = slots, weights_TK.dtype
        y_SD = y_SD.contiguous()
        weights_TK = (weights_TK * slots.is_placed_TK).to(y_SD.dtype)
        ctx.save_for_backward(y_SD, weights_TK)
        return sum_choices(y_SD, slots.slots_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        y_SD, weights_TK = ctx.saved_tensors
        slots: PairSlots = ctx.slots
        grad_TD = grad_outputs[0].contiguous()
        grad_weights_TK = grad_y_SD = None
        if ctx.needs_input_grad[1]:
            dots_TK = dot_choices(grad_TD, y_SD, slots.slots_TK)
            grad_weights_TK = dots_TK.masked_fill(~slots.is_placed_TK, 0.0).to(ctx.weights_dtype)
        if ctx.needs_input_grad[0] and grad_TD.shape[0] == 0:
            grad_y_SD = torch.zeros_like(y_SD)
        elif ctx.needs_input_grad[0]:
            weights_S1 = weights_TK.reshape(-1, 1).index_select(0, slots.pairs_S)
            weights_S1 = weights_S1.masked_fill(~slots.is_taken_S[:, None], 0.0)
            grad_y_SD = grad_TD.index_select(0, _tokens_S(slots)).mul_(weights_S1)
        return grad_y_SD, grad_weights_TK, None


def _tokens_S(slots: PairSlots) -> Tensor:
    return torch.div(slots.pairs_S, slots.slots_TK.shape[1], rounding_mode="floor")
