"""Index work of the all-to-all dispatcher, and what it refuses; its exchanges are tested on several ranks."""

from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ProcessGroup

from megatron_glue.moe.dispatcher_alltoall import AllToAllDispatcher, regrouping
from megatron_glue.ops.host_reader import HostReader
from tests.support.operator_watch import OperatorWatch


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_regrouping_equals_a_stable_sort(data):
    num_ranks = data.draw(st.integers(2, 5))
    num_local = data.draw(st.integers(2, 5))
    counts = data.draw(
        st.lists(
            st.lists(st.integers(0, 4), min_size=num_local, max_size=num_local),
            min_size=num_ranks,
            max_size=num_ranks,
        )
    )
    counts_Pe = torch.tensor(counts)
    experts_R = torch.arange(num_local).repeat(num_ranks).repeat_interleave(counts_Pe.reshape(-1))
    index, inverse = regrouping(counts_Pe, experts_R.shape[0])
    assert index is not None
    assert inverse is not None
    assert torch.equal(index, experts_R.argsort(stable=True))
    assert torch.equal(inverse[index], torch.arange(experts_R.shape[0]))


def test_regrouping_needs_nothing_when_orders_agree():
    assert regrouping(torch.tensor([[3, 2]]), 5) == (None, None)
    assert regrouping(torch.tensor([[3], [2]]), 5) == (None, None)


def test_f80_regrouping_neither_sorts_nor_waits():
    counts_Pe = torch.tensor([[1, 0, 2], [4, 1, 0]])
    with OperatorWatch() as watch:
        regrouping(counts_Pe, 8)
    assert watch.synchronising == []
    assert not [name for name in watch.calls if "sort" in name]


class FakeGroup:
    def size(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("num_experts", "num_replicas", "num_chunks", "match"),
    [
        (8, 3, 1, "num_replicas=3: does not divide the group of 4"),
        (6, 1, 1, "num_experts=6: 4 ranks cannot"),
        (8, 2, 5, "num_chunks=5: a rank has 4 experts"),
        (8, 1, 0, "num_chunks=0"),
    ],
)
def test_ranks_and_chunks_that_do_not_fit_are_refused(num_experts, num_replicas, num_chunks, match):
    with pytest.raises(ValueError, match=match):
        AllToAllDispatcher(cast(ProcessGroup, FakeGroup()), num_experts, HostReader(), num_replicas, num_chunks)


def test_chunks_are_as_even_as_the_experts_allow():
    dispatcher = AllToAllDispatcher(cast(ProcessGroup, FakeGroup()), 32, HostReader(), num_chunks=3)
    assert dispatcher.chunk_sizes == [2, 3, 3]
