"""The shared expert beside the exchange of rows: bit-equal to one after the other, and equal to one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_glue.activation.manager import ActivationManager
from megatron_glue.activation.plan import ActivationPlan
from megatron_glue.backends.grouped_mm import grouped_mm_torch
from megatron_glue.config.sections import ModelConfig, MoEConfig
from megatron_glue.moe.build import MoEExecution, MoEPlacement, build_moe_layer
from megatron_glue.moe.layer import MoELayer
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.engines.partial_sums import PartialSums
from megatron_glue.parallel.gather import gather_full_gradients
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import is_expert_parameter
from tests.support.collective_watch import CollectiveWatch
from tests.support.layer_cases import layer_build
from tests.support.moe_layouts import Layout, MicroBatch, local_micro_batch, whole_micro_batch
from tests.support.processes import run_distributed
from tests.support.tolerances import assert_close

MODEL = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=4, init_method_std=0.3)
LAYOUTS = {
    "dp 2": Layout(ep=2, lengths=((13,), (4, 2))),
    "tp 2": Layout(tp=2, ep=2, lengths=((7, 2),)),
    "tp 2, ranks without tokens": Layout(tp=2, ep=2, lengths=((3,),)),
    "tp 2, not exchanged": Layout(tp=2, lengths=((7, 2),)),
    "dp 2 x tp 2": Layout(tp=2, ep=2, etp=2, lengths=((7, 5), (3, 1))),
}


def build(mesh: ParallelMesh, *, overlap: bool) -> MoELayer:
    moe = MoEConfig(
        num_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=8,
        moe_shared_expert_intermediate_size=12,
        moe_shared_expert_overlap=overlap,
        moe_aux_loss_coeff=0.1,
        moe_z_loss_coeff=0.01,
    )
    execution = MoEExecution(grouped_mm_torch, HostReader())
    return build_moe_layer(MODEL, moe, MoEPlacement(0, "blocks.0.ffn"), execution, layer_build(MODEL, mesh=mesh))


def batches_of(layout: Layout, dp_rank: int) -> list[MicroBatch]:
    """Two micro-batches of one rank; padding holds what a residual stream would."""
    return [whole_micro_batch(layout, dp_rank, 16, probe_scale=scale, pad_value=0.5) for scale in (1.0, -0.7)]


def train(layer: MoELayer, batches: list[MicroBatch], *, recompute: bool, first_in_first_out: bool) -> list[Tensor]:
    """All micro-batches forward, then all backward; outputs and gradients of inputs."""
    manager = ActivationManager(ActivationPlan(recompute=recompute), "cpu")
    outs = [manager.run_block(layer, batch.x, batch.context) for batch in batches]
    pairs = list(zip(outs, batches, strict=True))
    for out, batch in pairs if first_in_first_out else pairs[::-1]:
        (out * batch.probe).sum().backward()
    return [out.detach() for out in outs] + [batch.x.grad for batch in batches if batch.x.grad is not None]


def sum_over_ranks(layer: MoELayer, mesh: ParallelMesh) -> None:
    """What an engine does at the end of backward."""
    for param in layer.parameters():
        assert param.grad is not None
        group = mesh.edp_group if is_expert_parameter(param) else mesh.dp_cp_group
        if group is not None:
            dist.all_reduce(param.grad, group=group)
    PartialSums(layer.parameters(), mesh).reduce()


def compare(rank: int, world_size: int, layouts: list[Layout]) -> None:
    for layout in layouts:
        mesh = layout.mesh()
        whole = build(ParallelMesh(), overlap=False)
        expected = [
            train(whole, batches_of(layout, dp_rank), recompute=False, first_in_first_out=True)
            for dp_rank in range(mesh.dp_size)
        ][mesh.dp_rank]
        whole_gradients = gather_full_gradients(whole, ParallelMesh())
        for recompute, first_in_first_out in itertools.product((False, True), (False, True)):
            results: list[list[Tensor]] = []
            for overlap in (False, True):
                layer = build(mesh, overlap=overlap)
                batches = [local_micro_batch(batch, mesh) for batch in batches_of(layout, mesh.dp_rank)]
                values = train(layer, batches, recompute=recompute, first_in_first_out=first_in_first_out)
                for value, wanted in zip(values, expected, strict=True):
                    whole_rows = wanted.clone()
                    whole_rows[batches[0].rows_T] = value
                    assert_close(whole_rows, wanted, what=f"rows of {layout}")
                results.append(values + [param.grad for param in layer.parameters() if param.grad is not None])
                sum_over_ranks(layer, mesh)
                gradients = gather_full_gradients(layer, mesh)
                assert gradients.keys() == whole_gradients.keys()
                for name, wanted in whole_gradients.items():
                    assert_close(gradients[name], wanted, what=f"gradient of {name}, {layout}")
            for off, on in zip(*results, strict=True):
                assert torch.equal(off, on)


@pytest.mark.parametrize("world_size", [2, 4])
def test_f51_overlap_changes_no_bit_and_every_gradient_equals_one_process(world_size):
    """With and without recompute, two micro-batches under way, their backwards in either order."""
    run_distributed(compare, world_size, [layout for layout in LAYOUTS.values() if layout.world_size == world_size])


def watch(rank: int, world_size: int, layout: Layout) -> dict[str, list[list[str]]]:
    """Events of forward and of backward, without and with the overlap."""
    mesh = layout.mesh()
    events: dict[str, list[list[str]]] = {}
    for overlap in (False, True):
        layer = build(mesh, overlap=overlap)
        batch = local_micro_batch(batches_of(layout, mesh.dp_rank)[0], mesh)
        with CollectiveWatch() as forward:
            out = layer(batch.x, batch.context)
        with CollectiveWatch() as backward:
            (out * batch.probe).sum().backward()
        events["overlap" if overlap else "serial"] = [forward.events, backward.events]
    return events


def products_beside_an_exchange(events: list[str]) -> int:
    """Products between the start of an exchange and its end."""
    under_way, products = 0, 0
    for event in events:
        under_way += {"all_to_all": 1, "all_to_all done": -1}.get(event, 0)
        products += event == "product" and under_way > 0
    assert under_way == 0, "every exchange that started is awaited"
    return products


@pytest.mark.parametrize("name", ["dp 2", "tp 2"])
def test_the_shared_expert_runs_beside_the_exchange_in_both_passes(name):
    """Its two products in forward; in backward also their two gradients each. Experts make no plain products.

    Without the overlap the two of forward run beside the exchange of counts, and none beside one of rows.
    """
    events: list[dict[str, Any]] = run_distributed(watch, 2, LAYOUTS[name])
    for of_rank in events:
        assert [products_beside_an_exchange(of_pass) for of_pass in of_rank["serial"]] == [2, 0]
        assert [products_beside_an_exchange(of_pass) for of_pass in of_rank["overlap"]] == [2, 4]
