"""Slots against a plain loop over pairs; empty slots are poisoned."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_glue.ops.grouping import group_tokens
from megatron_glue.ops.slots import assign_slots, fill_slots, sum_slots
from megatron_glue.types import PairSlots
from tests.support.operator_watch import OperatorWatch
from tests.support.tolerances import assert_close

WIDTH = 3


def slots_by_loop(ids_TK: torch.Tensor, num_local: int, num_ranks: int, capacity: int) -> dict[tuple[int, int], int]:
    """(token, choice) -> slot, for those that have one."""
    pairs = [(int(expert), t, k) for t, row in enumerate(ids_TK) for k, expert in enumerate(row)]
    taken, slots = [0] * num_ranks, {}
    for expert, t, k in sorted(pairs):
        rank = expert // num_local
        if taken[rank] < capacity:
            slots[t, k] = rank * capacity + taken[rank]
        taken[rank] += 1
    return slots


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_slots_equal_a_loop_over_pairs(data):
    num_ranks, num_local = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    num_tokens, top_k = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 2))
    capacity = data.draw(st.integers(1, 14))
    num_experts = num_ranks * num_local
    seed = data.draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.randint(0, num_experts, (num_tokens, top_k), generator=generator)
    slots = assign_slots(group_tokens(ids_TK, num_experts, num_ranks=num_ranks), capacity)
    expected = slots_by_loop(ids_TK, num_local, num_ranks, capacity)
    assert slots.num_overflowing == num_tokens * top_k - len(expected)
    assert slots.is_placed_TK.sum() == slots.is_taken_S.sum() == len(expected)
    for (t, k), slot in expected.items():
        assert slots.slots_TK[t, k] == slot
        assert slots.pairs_S[slot] == t * top_k + k
        assert slots.is_taken_S[slot]
    check_rows(slots, expected, torch.randn(num_tokens, WIDTH, generator=generator), generator)


def check_rows(
    slots: PairSlots, expected: dict[tuple[int, int], int], x: torch.Tensor, generator: torch.Generator
) -> None:
    """Values and gradients of both copies, against sums over pairs that have a slot."""
    num_slots, (num_tokens, top_k) = slots.pairs_S.shape[0], slots.slots_TK.shape
    nan = ~slots.is_taken_S[:, None]
    x.requires_grad_()
    filled = fill_slots(x, slots)
    assert torch.isfinite(filled).all(), "what leaves is some row"
    probe = torch.randn(num_slots, WIDTH, generator=generator)
    filled.backward(probe.masked_fill(nan, float("nan")))
    y = torch.randn(num_slots, WIDTH, generator=generator).masked_fill(nan, float("nan")).requires_grad_()
    weights = torch.randn(num_tokens, top_k, generator=generator, requires_grad=True)
    out = sum_slots(y, slots, weights)
    out_probe = torch.randn(num_tokens, WIDTH, generator=generator)
    out.backward(out_probe)
    x_grad, y_grad = torch.zeros(num_tokens, WIDTH), torch.zeros(num_slots, WIDTH)
    summed, weights_grad = torch.zeros(num_tokens, WIDTH), torch.zeros(num_tokens, top_k)
    for (t, k), slot in expected.items():
        assert torch.equal(filled[slot], x[t])
        x_grad[t] += probe[slot]
        summed[t] += weights.detach()[t, k] * y.detach()[slot]
        y_grad[slot] = weights.detach()[t, k] * out_probe[t]
        weights_grad[t, k] = out_probe[t] @ y.detach()[slot]
    for what, actual, wanted in (
        ("token gradient", x.grad, x_grad),
        ("sum", out, summed),
        ("row gradient", y.grad, y_grad),
        ("weight gradient", weights.grad, weights_grad),
    ):
        assert actual is not None, what
        assert_close(actual, wanted, what=what)


def test_f80_assigning_slots_waits_for_nothing():
    groups = group_tokens(torch.tensor([[0, 3], [1, 3], [3, 2]]), 4, num_ranks=2, implementation="torch")
    with OperatorWatch() as watch:
        slots = assign_slots(groups, 2)
        x = torch.ones(3, WIDTH, requires_grad=True)
        sum_slots(fill_slots(x, slots), slots, torch.ones(3, 2)).sum().backward()
    assert watch.synchronising == []


def test_a_rank_without_slots_is_refused():
    with pytest.raises(ValueError, match="capacity=0: a rank needs at least one slot"):
        assign_slots(group_tokens(torch.tensor([[0]]), 1), 0)
