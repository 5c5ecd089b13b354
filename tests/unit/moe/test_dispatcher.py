from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ProcessGroup

from megatron_glue.moe.dispatcher import AllToAllDispatcher, LocalDispatcher, regrouping
from megatron_glue.ops.grouping import group_tokens
from megatron_glue.ops.host_reader import HostReader
from tests.support.moe_cases import random_rows
from tests.support.operator_watch import OperatorWatch
from tests.support.tolerances import assert_close


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


def test_local_dispatch_and_combine_are_a_weighted_identity():
    x = random_rows(7, 4)
    ids = torch.tensor([[0, 2], [1, 2], [2, 0], [0, 1], [2, 1], [0, 2], [1, 0]])
    weights = torch.rand(7, 2)
    dispatcher = LocalDispatcher()
    started = dispatcher.start_dispatch(x, group_tokens(ids, 3))
    rows, metadata = dispatcher.finish_dispatch(started), started.metadata
    assert metadata.counts_e.tolist() == [5, 4, 5]
    assert torch.equal(rows[:5], x[[0, 2, 3, 5, 6]])
    out = dispatcher.combine(rows, metadata, weights)
    assert_close(out, x * weights.sum(1, keepdim=True))


def test_reused_metadata_is_returned_as_it_is():
    x = random_rows(3, 4)
    groups = group_tokens(torch.tensor([[0], [1], [0]]), 2)
    dispatcher = LocalDispatcher()
    metadata = dispatcher.start_dispatch(x, groups).metadata
    assert dispatcher.start_dispatch(x, groups, metadata).metadata is metadata


def test_replicas_that_do_not_divide_the_group_are_refused():
    class FakeGroup:
        def size(self) -> int:
            return 4

    with pytest.raises(ValueError, match="num_replicas=3"):
        AllToAllDispatcher(cast(ProcessGroup, FakeGroup()), HostReader(), 3)
