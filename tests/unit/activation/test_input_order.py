"""What backward most likely asks for next."""

from __future__ import annotations

import torch

from megatron_glue.activation.input_order import InputOrder
from megatron_glue.activation.tiers import StoredInput, Transfer


def stored():
    return StoredInput(torch.Size([1]), torch.float32, 4, None, Transfer(None, None))


def order_of(*lengths):
    order, chains = InputOrder(), []
    for micro_batch, length in enumerate(lengths):
        chains.append([stored() for _ in range(length)])
        for item in chains[-1]:
            order.append(micro_batch, item)
    return order, chains


def test_backward_goes_down_a_micro_batch_then_to_the_oldest_other_one():
    order, (first, second, third) = order_of(2, 3, 1)
    assert order.first() is first[1]
    assert order.after(0, first[1]) is first[0]
    assert order.after(0, first[0]) is second[2]
    assert order.after(1, second[0]) is first[1]
    for item in reversed(first):
        order.remove(0, item)
    assert order.first() is second[2]
    assert order.after(1, second[0]) is third[0]
    assert len(order) == 4


def test_nothing_follows_the_last_one():
    order, ((only,),) = order_of(1)
    assert order.after(0, only) is None
    assert order.pop_all() == [only]
    assert order.first() is None
    assert len(order) == 0


def test_skipped_input_is_passed_over_once_removed():
    order, (chain,) = order_of(3)
    order.remove(0, chain[1])
    assert order.after(0, chain[2]) is chain[0]
