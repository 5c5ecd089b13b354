"""Sizes and index work of bounded exchanges, and what they refuse; the exchanges are tested on several ranks."""

from typing import cast

import pytest
import torch
from torch.distributed import ProcessGroup

from megatron_glue.moe.dispatcher_alltoall import AllToAllDispatcher, regrouping
from megatron_glue.moe.dispatcher_bounded import BoundedDispatcher, received_counts, slots_per_rank
from megatron_glue.ops.host_reader import HostReader
from tests.support.operator_watch import OperatorWatch


@pytest.mark.parametrize(
    ("factor", "num_pairs", "num_ranks", "expected"),
    [
        (1.0, 256, 2, 128),
        (1.25, 256, 2, 160),
        (1.0, 250, 4, 64),
        (1.01, 256, 4, 72),
        (4.0, 256, 4, 256),
        (100.0, 256, 4, 256),
        (1.0, 3, 4, 3),
        (1.0, 0, 4, 1),
    ],
)
def test_room_is_a_multiple_of_an_even_share(factor: float, num_pairs: int, num_ranks: int, expected: int) -> None:
    """Rounded up to 8 rows, and never more than a rank can bring."""
    assert slots_per_rank(factor, num_pairs, num_ranks) == expected


def test_received_counts_stop_at_the_capacity_and_name_empty_rows() -> None:
    counts_Pe = torch.tensor([[1, 2, 0], [3, 4, 2], [0, 0, 9], [0, 0, 0]])
    expected = torch.tensor([[1, 2, 0, 2], [3, 2, 0, 0], [0, 0, 5, 0], [0, 0, 0, 5]])
    with OperatorWatch() as watch:
        counts_PX = received_counts(counts_Pe, 5)
        order_R, inverse_R = regrouping(counts_PX, 20)
    assert watch.synchronising == []
    assert torch.equal(counts_PX, expected)
    assert order_R is not None
    assert inverse_R is not None
    experts_R = torch.arange(4).repeat(4).repeat_interleave(expected.reshape(-1))
    assert torch.equal(order_R, experts_R.argsort(stable=True)), "empty rows stand behind all others"


class FakeGroup:
    def size(self) -> int:
        return 4


@pytest.mark.parametrize(("num_replicas", "num_chunks"), [(2, 1), (1, 2)])
def test_chunks_and_parts_of_experts_are_refused(num_replicas: int, num_chunks: int) -> None:
    exact = AllToAllDispatcher(cast(ProcessGroup, FakeGroup()), 8, HostReader(), num_replicas, num_chunks)
    with pytest.raises(ValueError, match=r"capacity_factor=1.5: .* neither chunks"):
        BoundedDispatcher(exact, 1.5)
