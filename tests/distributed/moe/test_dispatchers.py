"""Every dispatcher over ranks against one process, and in which order each one sends, reads and computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_glue.backends.deepep import DeepEPBuffers
from megatron_glue.backends.grouped_mm import grouped_mm_torch
from megatron_glue.backends.permutation import TORCH_PERMUTATION
from megatron_glue.moe.dispatcher_alltoall import AllToAllDispatcher
from megatron_glue.moe.dispatcher_bounded import BoundedDispatcher
from megatron_glue.moe.dispatcher_deepep import deepep_dispatcher
from megatron_glue.moe.dispatcher_registry import DISPATCHERS, DispatcherEntry
from megatron_glue.moe.layer import MoELayer
from megatron_glue.types import SavedDecisions
from tests.support import deep_ep_stand_in
from tests.support.collective_watch import CollectiveWatch
from tests.support.moe_cases import MoECase
from tests.support.moe_layouts import (
    Job,
    Layout,
    compare_with_one_process,
    favour,
    local_micro_batch,
    run,
    whole_micro_batch,
)
from tests.support.processes import run_distributed

CASE = MoECase(num_experts=6, top_k=2, aux_loss_coeff=0.1, z_loss_coeff=0.01, has_expert_bias=True)
TWO_RANKS = [
    Layout(ep=2, lengths=((13,), (4, 2))),
    Layout(tp=2, ep=2, lengths=((7, 5),)),
    Layout(ep=2, lengths=((8,), ())),
    Layout(ep=2, lengths=((), ())),
    Layout(ep=2, lengths=((7,), (5,)), favoured=(0, 1)),
    Layout(ep=2, lengths=((7,), (5,)), favoured=(2, 5)),
]
SPLIT_EXPERTS = [Layout(etp=2, lengths=((13,), (4, 2))), Layout(etp=2, lengths=((), (5,)))]
FOUR_RANKS = [
    Layout(ep=2, etp=2, lengths=((5,), (9,), (1,), (3, 4))),
    Layout(tp=2, ep=2, etp=2, lengths=((5,), ())),
    Layout(tp=2, ep=2, lengths=((7, 5), (3, 10))),
]
WAYS: dict[str, MoECase] = {
    "2 chunks": CASE.with_(num_chunks=2),
    "3 chunks": CASE.with_(num_chunks=3),
    "3 chunks by slice": CASE.with_(num_chunks=3, one_pass=False),
    "all-gather": CASE.with_(dispatcher="allgather"),
    "all-gather by slice": CASE.with_(dispatcher="allgather", one_pass=False),
    "bounded": CASE.with_(capacity_factor=2.0),
    "bounded by slice": CASE.with_(capacity_factor=2.0, one_pass=False),
    "deepep": CASE.with_(dispatcher="deepep"),
}


def compare(rank: int, world_size: int, jobs: list[Job]) -> list[int]:
    """DeepEP by its stand-in, whose parts the registry would refuse on a CPU."""
    deep_ep_stand_in.install()
    buffers = DeepEPBuffers()
    DISPATCHERS["deepep"] = DispatcherEntry(
        lambda group, needs: deepep_dispatcher(group, needs.num_experts, needs.host_reader, buffers), lambda needs: ""
    )
    return compare_with_one_process(rank, world_size, jobs)


@pytest.mark.parametrize("world_size", [2, 4])
def test_f53_f73_every_way_equals_one_process(world_size: int) -> None:
    """Ranks without tokens, experts without tokens, all tokens to one chunk; with and without recompute."""
    jobs: list[Job] = []
    expected: list[int | None] = []
    for case in WAYS.values():
        layouts = TWO_RANKS + SPLIT_EXPERTS if world_size == 2 else FOUR_RANKS
        if case.dispatcher == "deepep" or case.capacity_factor is not None:
            layouts = [layout for layout in layouts if layout.etp == 1]
        jobs += [Job(layouts[0], case), *(Job(layout, case, recompute=True) for layout in layouts)]
        reads = {"alltoall": 1, "allgather": 0, "deepep": 1}[case.dispatcher] if case.one_pass else None
        reads = 0 if case.one_pass and case.capacity_factor is not None else reads
        expected += [reads] * (1 + len(layouts))
    for num_reads in run_distributed(compare, world_size, jobs):
        one_pass_reads = [reads if job.case.one_pass else None for job, reads in zip(jobs, num_reads, strict=True)]
        assert one_pass_reads == expected


def bit_equal(rank: int, world_size: int, layout: Layout) -> None:
    """Chunks give each expert the rows of one exchange, in the same order."""
    mesh = layout.mesh()
    results = []
    for num_chunks in (1, 2, 3):
        layer = CASE.with_(num_chunks=num_chunks).build(mesh)
        batch = local_micro_batch(whole_micro_batch(layout, mesh.dp_rank, CASE.hidden_size), mesh)
        results.append([*run(layer, batch), *(param.grad for param in layer.parameters())])
    for chunked in results[1:]:
        for actual, wanted in zip(chunked, results[0], strict=True):
            assert torch.equal(actual, wanted)


def test_chunks_change_no_bit() -> None:
    run_distributed(bit_equal, 2, TWO_RANKS[0])


class SharedExpert(torch.nn.Module):
    """Appends ``shared`` to events."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def forward(self, x_TD: Tensor, context: object) -> Tensor:
        self.events.append("shared")
        return x_TD * 2


def watch(rank: int, world_size: int, case: MoECase) -> list[list[str]]:
    """Events of forward, its backward, a recompute, its backward."""
    mesh = TWO_RANKS[0].mesh()
    batch = local_micro_batch(whole_micro_batch(TWO_RANKS[0], mesh.dp_rank, case.hidden_size), mesh)
    context = replace(batch.context, decisions=SavedDecisions())
    phases = []
    with CollectiveWatch() as watched:
        layer = case.build(mesh, shared_expert=SharedExpert(watched.events))
        record(layer, watched.events)
        for is_recompute in (False, True):
            out = layer(batch.x, replace(context, is_recompute=is_recompute))
            phases.append([event for event in watched.events if event != "product"])
            watched.events.clear()
            (out * batch.probe).sum().backward()
            phases.append([event for event in watched.events if event != "product"])
            watched.events.clear()
    return phases


def record(layer: MoELayer, events: list[str]) -> None:
    """Let the parts of a layer tell what they do. One rank's process lives for one watch."""
    products, read = layer.experts._grouped_mm, layer.config.host_reader.read

    def recorded_products(x: Tensor, weight: Tensor, offsets: Tensor, *, zero_tail: bool = False) -> Tensor:
        events.append("experts")
        out = products(x, weight, offsets, zero_tail=zero_tail)
        out.register_hook(lambda grad: events.append("experts"))
        return out

    def recorded_read(tensor: Tensor) -> Any:
        events.append("read")
        return read(tensor)

    def recorded_permute(*args: Any, **kwargs: Any) -> Tensor:
        events.append("permute")
        return TORCH_PERMUTATION.permute_rows(*args, **kwargs)

    layer.experts._grouped_mm = recorded_products
    layer.config.host_reader.read = recorded_read
    permutation: Any = replace(TORCH_PERMUTATION, permute_rows=recorded_permute)
    dispatcher: Any = layer.dispatcher
    if isinstance(dispatcher, BoundedDispatcher):
        return
    attribute = "permutation" if isinstance(dispatcher, AllToAllDispatcher) else "_permutation"
    setattr(dispatcher, attribute, permutation)


EXCHANGE, DONE = "all_to_all", "all_to_all done"


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_the_host_waits_for_the_splits_last(is_overlapped: bool) -> None:
    """Permutation and shared expert are issued before; the shared expert that runs beside the rows must follow them."""
    case = CASE.with_(overlap_shared_expert=is_overlapped)
    for forward, backward, recompute, recomputed_backward in run_distributed(watch, 2, case):
        first = [EXCHANGE, "permute"]
        splits = [DONE, "read"]
        rows = [EXCHANGE, "shared"] if is_overlapped else [EXCHANGE]
        rest = [DONE, "experts", "experts", EXCHANGE, DONE]
        before = [] if is_overlapped else ["shared"]
        assert forward == [*first, *before, *splits, *rows, *rest]
        # F50: neither counts nor a read, one exchange of rows each way.
        assert recompute == ["permute", *before, *rows, *rest]
        assert backward == recomputed_backward == [EXCHANGE, DONE, "experts", "experts", EXCHANGE, DONE]


def test_the_next_chunks_rows_travel_while_one_is_computed() -> None:
    """Forward: 1, 2 and 3 leave; 2's exchange is launched before 1 is computed, and so on. Backward mirrors it."""
    experts = ["experts", "experts"]
    forward_rows = [
        *(EXCHANGE, EXCHANGE, DONE, *experts),
        *(EXCHANGE, EXCHANGE, DONE, *experts),
        *(EXCHANGE, DONE, *experts),
        *(EXCHANGE, DONE, DONE, DONE),
    ]
    backward_rows = [
        *(EXCHANGE, EXCHANGE, EXCHANGE),
        *(DONE, *experts, EXCHANGE),
        *(DONE, *experts, EXCHANGE, DONE),
        *(DONE, *experts, EXCHANGE, DONE, DONE),
    ]
    for forward, backward, recompute, recomputed_backward in run_distributed(watch, 2, CASE.with_(num_chunks=3)):
        assert forward == [EXCHANGE, "permute", "shared", DONE, "read", *forward_rows]
        assert recompute == ["permute", "shared", *forward_rows]
        assert backward == recomputed_backward == backward_rows


def test_f80_the_all_gather_reads_nothing_and_exchanges_choices_once() -> None:
    case = CASE.with_(dispatcher="allgather", overlap_shared_expert=True)
    gathers, waits = ["gather", "gather"], ["gather done", "gather done"]
    rest = ["permute", "experts", "experts", "reduce_scatter", "reduce_scatter done"]
    for forward, backward, recompute, recomputed_backward in run_distributed(watch, 2, case):
        assert forward == ["gather", *gathers, "shared", "gather done", *waits, *rest]
        assert recompute == [*gathers, "shared", *waits, *rest]
        assert backward == recomputed_backward
        assert backward[:4] == ["gather", "gather done", "experts", "experts"]
        assert sorted(backward[4:]) == ["reduce_scatter", "reduce_scatter", *["reduce_scatter done"] * 2]


def poison_tail(rank: int, world_size: int, case: MoECase) -> None:
    """Rows past the last offset of a grouped product are NaN, in the result and in the gradient of its rows."""
    layout = TWO_RANKS[0]
    mesh = layout.mesh()
    results = []
    for is_poisoned in (False, True):
        layer = case.build(mesh)
        if is_poisoned:
            layer.experts._grouped_mm = poisoned_products
        batch = local_micro_batch(whole_micro_batch(layout, mesh.dp_rank, CASE.hidden_size), mesh)
        results.append([*run(layer, batch), *(param.grad for param in layer.parameters())])
    for actual, wanted in zip(*results, strict=True):
        assert torch.equal(actual, wanted)


def poisoned_products(x: Tensor, weight: Tensor, offsets: Tensor, *, zero_tail: bool = False) -> Tensor:
    is_tail = (torch.arange(x.shape[0]) >= offsets[-1])[:, None]
    x = x.view_as(x)
    x.register_hook(lambda grad: grad.masked_fill(is_tail, float("nan")))
    y = grouped_mm_torch(x, weight, offsets)
    return y.masked_fill(is_tail, float("nan"))


def test_f57_rows_of_other_ranks_experts_are_never_read() -> None:
    run_distributed(poison_tail, 2, CASE.with_(dispatcher="allgather"))


def test_f57_empty_slots_are_never_read() -> None:
    run_distributed(poison_tail, 2, CASE.with_(capacity_factor=2.0))


def overflow(rank: int, world_size: int, is_poisoned: bool) -> tuple[int, int]:
    """All tokens choose the two experts of rank 0, where there is room for half of them."""
    layout = Layout(ep=2, lengths=((13,), (5,)), favoured=(0, 1))
    mesh = layout.mesh()
    layer = CASE.with_(capacity_factor=1.0, aux_loss_coeff=0.0, z_loss_coeff=0.0).build(mesh)
    favour(layer, layout.favoured)
    if is_poisoned:
        layer.experts._grouped_mm = poisoned_products
    batch = local_micro_batch(whole_micro_batch(layout, mesh.dp_rank, CASE.hidden_size), mesh)
    out, x_grad = run(layer, batch, recompute=True)
    assert torch.isfinite(x_grad).all()
    assert all(torch.isfinite(param.grad).all() for param in layer.parameters() if param.grad is not None)
    # Pairs in expert order: the 13 of expert 0 have room, and 3 of those of expert 1.
    others = CASE.build(mesh)
    favour(others, layout.favoured)
    whole = run(others, local_micro_batch(whole_micro_batch(layout, mesh.dp_rank, CASE.hidden_size), mesh))[0]
    is_whole = (out - whole).abs().amax(1) < 1e-5
    (lost,) = batch.context.overflow_log or []
    return int(lost), int(is_whole[: sum(layout.lengths[rank])].sum())


@pytest.mark.parametrize("is_poisoned", [False, True])
def test_pairs_without_room_are_counted_and_touch_no_other(is_poisoned: bool) -> None:
    (lost, num_whole), (other_lost, other_whole) = run_distributed(overflow, 2, is_poisoned)
    assert (lost, num_whole) == (2 * 13 - 16, 3)
    assert (other_lost, other_whole) == (0, 5)


def exact_without_a_log(rank: int, world_size: int) -> int:
    layout = Layout(ep=2, lengths=((13,), (5,)), favoured=(0, 1))
    results = []
    for factor in (1.0, None):
        layer = CASE.with_(capacity_factor=factor).build(layout.mesh())
        favour(layer, layout.favoured)
        batch = local_micro_batch(whole_micro_batch(layout, rank, CASE.hidden_size), layout.mesh())
        batch = replace(batch, context=replace(batch.context, overflow_log=None))
        results.append([*run(layer, batch), *(param.grad for param in layer.parameters())])
    assert all(torch.equal(actual, wanted) for actual, wanted in zip(*results, strict=True))
    return layer.config.host_reader.count


def test_nothing_overflows_where_nobody_looks() -> None:
    """Evaluation, sampling, and the step that is run again."""
    assert run_distributed(exact_without_a_log, 2) == [1, 1]


def test_a_bounded_exchange_waits_for_counts_on_the_device_only() -> None:
    case = CASE.with_(capacity_factor=1.5, overlap_shared_expert=True)
    for forward, backward, recompute, recomputed_backward in run_distributed(watch, 2, case):
        rest = ["experts", "experts", EXCHANGE, DONE]
        assert forward == [EXCHANGE, EXCHANGE, "shared", DONE, DONE, *rest]
        assert recompute == [EXCHANGE, "shared", DONE, *rest]
        assert backward == recomputed_backward == [EXCHANGE, DONE, "experts", "experts", EXCHANGE, DONE]
