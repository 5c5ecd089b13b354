"""Engines, norms and gathering for parameters that tensor and expert parallelism split: gradients known by hand.

The model multiplies each of its parameters with weights that depend on the data rank and on the parameter's place in
the whole, so that every gradient is that table, and its sum over the ranks that see different data is known.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_glue.config.sections import ParallelConfig
from megatron_glue.parallel.data_parallel import wrap_data_parallel
from megatron_glue.parallel.gather import differing_replicas, gather_full_gradients, gather_full_parameters
from megatron_glue.parallel.grad_norm import global_grad_norm
from megatron_glue.parallel.managed_block import ManagedBlock
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.precision import Precision, local
from megatron_glue.parallel.shard_spec import ShardSpec, set_shard_spec, tensor_split
from tests.support.processes import run_distributed
from tests.support.tolerances import assert_close

SPECS = [
    ShardSpec("column", (8, 4), tensor_split(0)),
    ShardSpec("row", (4, 8), tensor_split(1)),
    ShardSpec("kv", (2, 3, 4), (("tp", 0),), ("kv_copy",)),
    ShardSpec("norm", (6,), (), ("tp",)),
    ShardSpec("experts", (4, 2, 8), (("ep", 0), ("etp", 2))),
]
NUM_MICRO_BATCHES = 2
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tensor_model_parallel_size": 2}),
    (4, {"tensor_model_parallel_size": 4}),
    (4, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    (4, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    (4, {"context_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    (8, {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "expert_model_parallel_size": 4}),
]


def table(spec: ShardSpec, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + len(spec.global_name))
    return torch.randn(spec.global_shape, generator=generator)


class Block(nn.Module):
    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        for spec in SPECS:
            part = table(spec, 0)[spec.local_slices(mesh.axis_sizes, mesh.axis_ranks)].clone()
            param = nn.Parameter(part)
            set_shard_spec(param, spec)
            self.register_parameter(spec.global_name, param)

    def forward(self, x_TD: Tensor, context: dict[str, Tensor]) -> Tensor:
        for name, weights in context.items():
            x_TD = x_TD + (local(getattr(self, name), torch.float32) * weights).sum()
        return x_TD


class Model(nn.Module):
    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ManagedBlock(Block(mesh), lambda block, x, context: block(x, context))])

    def forward(self, context: dict[str, Tensor]) -> Tensor:
        return self.blocks[0](torch.zeros(()), context)


def weights_of(spec: ShardSpec, mesh: ParallelMesh, micro_batch: int) -> Tensor:
    """What this rank multiplies its part with: other numbers for each rank that sees other tokens or heads."""
    is_partial = bool(spec.partial_axes) or spec.is_expert
    seen = mesh.rank if is_partial else mesh.ranks.get("dp_cp", 0)
    whole = table(spec, 1 + micro_batch * 100 + seen)
    return whole[spec.local_slices(mesh.axis_sizes, mesh.axis_ranks)]


def expected_gradient(spec: ShardSpec, mesh: ParallelMesh) -> Tensor:
    """Sum over the ranks that hold a slice and see something else, put together over slices."""
    total = torch.zeros(spec.global_shape)
    holders = range(mesh.world_size) if spec.partial_axes or spec.is_expert else range(mesh.sizes["dp_cp"])
    for micro_batch in range(NUM_MICRO_BATCHES):
        for rank in holders:
            whole = table(spec, 1 + micro_batch * 100 + rank)
            if spec.partial_axes or spec.is_expert:
                own = spec.local_slices(mesh.axis_sizes, ranks_along_axes(rank, mesh))
                total[own] += whole[own]
            else:
                total += whole
    return total


def ranks_along_axes(rank: int, mesh: ParallelMesh) -> dict[str, int]:
    tensor, inner = rank % mesh.tp_size, rank % (mesh.ep_size * mesh.etp_size)
    return {
        "tp": tensor // mesh.kv_copies,
        "kv_copy": tensor % mesh.kv_copies,
        "ep": inner // mesh.etp_size,
        "etp": inner % mesh.etp_size,
    }


def compare(rank: int, world_size: int, options: dict[str, Any]) -> None:
    parallel = ParallelConfig(**options)
    mesh = ParallelMesh.build(parallel, "cpu", num_kv_heads=2)
    assert mesh.axis_ranks == ranks_along_axes(rank, mesh)
    engine = wrap_data_parallel(Model(mesh), mesh, parallel, Precision(torch.float32))
    assert not differing_replicas(engine.module, mesh)
    parameters = gather_full_parameters(engine.module, mesh)
    for spec in SPECS:
        assert torch.equal(parameters[spec.global_name], table(spec, 0)), spec.global_name
    for _ in range(2):
        engine.module.zero_grad(set_to_none=True)
        for micro_batch in range(NUM_MICRO_BATCHES):
            context = {spec.global_name: weights_of(spec, mesh, micro_batch) for spec in SPECS}
            with engine.micro_batch(is_last=micro_batch == NUM_MICRO_BATCHES - 1):
                engine.backward(engine.module(context))
        engine.finish_backward()
        gradients = gather_full_gradients(engine.module, mesh)
        squares = torch.zeros(())
        for spec in SPECS:
            expected = expected_gradient(spec, mesh)
            squares += expected.square().sum()
            assert_close(gradients[spec.global_name], expected, what=f"gradient of {spec.global_name}")
        assert_close(global_grad_norm(engine.gradient_parameters(), mesh), squares.sqrt(), what="norm")


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
def test_gradients_of_split_parameters_are_sums(world_size: int, layout: dict[str, Any], engine: str) -> None:
    run_distributed(compare, world_size, {**layout, "data_parallel_engine": engine})


@pytest.mark.parametrize(
    "options",
    [
        {"num_distributed_optimizer_instances": 2},
        {"num_distributed_optimizer_instances": 2, "expert_model_parallel_size": 2, "zero_stage": 2},
        {"num_distributed_optimizer_instances": 2, "tensor_model_parallel_size": 2},
    ],
    ids=str,
)
def test_replicas_of_sharded_weights_give_the_same_sums(options: dict[str, Any]) -> None:
    run_distributed(compare, 4, {**options, "data_parallel_engine": "fsdp2"})
