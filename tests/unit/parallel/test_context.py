"""Which exchange a run gets."""

from __future__ import annotations

from typing import Any

from megatron_glue.parallel.context import GatherExchange, RingExchange, context_exchange
from megatron_glue.parallel.mesh import ParallelMesh


def test_the_exchange_is_the_one_asked_for() -> None:
    group: Any = object()
    mesh = ParallelMesh(sizes={"cp": 4}, ranks={"cp": 3}, groups={"cp": group})
    ring, gather = context_exchange(mesh, "p2p"), context_exchange(mesh, "allgather")
    assert isinstance(ring, RingExchange)
    assert (ring.group, ring.rank, ring.size, ring.is_ring) == (group, 3, 4, True)
    assert isinstance(gather, GatherExchange)
    assert (gather.group, gather.is_ring) == (group, False)


def test_one_rank_exchanges_nothing() -> None:
    assert context_exchange(ParallelMesh(), "p2p") is None
