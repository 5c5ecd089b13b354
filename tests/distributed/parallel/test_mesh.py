"""Ranks, groups and device meshes of several processes."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import ParallelConfig
from megatron_glue.parallel.gather import gather_full_tensors
from megatron_glue.parallel.mesh import DENSE_AXES, EXPERT_AXES, ParallelMesh
from megatron_glue.parallel.shard_spec import ShardSpec, set_shard_spec, tensor_split
from tests.support.processes import run_distributed


def check_coordinates(rank: int, world_size: int) -> None:
    for engine, data_axis in (("ddp", "dp_replicate"), ("fsdp2", "fsdp")):
        parallel = ParallelConfig(data_parallel_engine=engine, expert_model_parallel_size=2)
        mesh = ParallelMesh.build(parallel, "cpu")
        assert (mesh.rank, mesh.dp_rank, mesh.ep_rank, mesh.edp_rank) == (rank, rank, rank % 2, rank // 2)
        assert (mesh.dp_size, mesh.ep_size, mesh.edp_size) == (4, 2, 2)
        assert mesh.dense_mesh is not None
        assert mesh.expert_mesh is not None
        assert mesh.dense_mesh.mesh_dim_names == DENSE_AXES
        assert mesh.expert_mesh.mesh_dim_names == EXPERT_AXES
        assert mesh.dense_mesh[data_axis].size() == 4
        assert mesh.fsdp_mesh is not None
        assert mesh.fsdp_mesh.size(-1) == (4 if engine == "fsdp2" else 1)
        # Neighbours exchange tokens; ranks with the same experts lie ep apart.
        assert dist.get_process_group_ranks(mesh.ep_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert dist.get_process_group_ranks(mesh.edp_group) == [rank % 2, rank % 2 + 2]
        assert dist.get_process_group_ranks(mesh.dp_group) == [0, 1, 2, 3]
    whole = ParallelMesh.build(ParallelConfig(expert_model_parallel_size=4), "cpu")
    assert whole.edp_group is None
    assert ParallelMesh.build(ParallelConfig(), "cpu").ep_group is None
    with pytest.raises(ConfigError, match="--expert-model-parallel-size=3"):
        ParallelMesh.build(ParallelConfig(expert_model_parallel_size=3), "cpu")


def test_coordinates_and_groups() -> None:
    run_distributed(check_coordinates, 4)


def check_all_axes(rank: int, world_size: int) -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True
    )
    mesh = ParallelMesh.build(parallel, "cpu", num_kv_heads=1)
    assert (mesh.pp_rank, mesh.cp_rank, mesh.tp_rank) == (rank // 4, rank // 2 % 2, rank % 2)
    assert (mesh.kv_copies, mesh.axis_ranks["tp"], mesh.axis_ranks["kv_copy"]) == (2, 0, rank % 2)
    assert dist.get_process_group_ranks(mesh.stage_group) == list(range(rank // 4 * 4, rank // 4 * 4 + 4))
    assert dist.get_process_group_ranks(mesh.embedding_group) == [rank % 4, rank % 4 + 4]
    assert dist.get_process_group_ranks(mesh.dp_cp_group) == [rank // 4 * 4 + rank % 2, rank // 4 * 4 + rank % 2 + 2]
    assert mesh.residual_rows(8) == slice(rank % 2 * 4, rank % 2 * 4 + 4)
    spec = ShardSpec("weight", (4, 6), tensor_split(1))
    whole = torch.arange(24.0).view(4, 6)
    part = whole[spec.local_slices(mesh.axis_sizes, mesh.axis_ranks)].contiguous()
    param = torch.nn.Parameter(part)
    set_shard_spec(param, spec)
    assert torch.equal(gather_full_tensors([("weight", param, part)], mesh)["weight"], whole)


def test_all_axes_together() -> None:
    run_distributed(check_all_axes, 8)


def check_timeouts(rank: int, world_size: int) -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True)
    mesh = ParallelMesh.build(parallel, "cpu")
    cpu = torch.device("cpu")
    waits = {name: group._get_backend(cpu).options._timeout for name, group in mesh.groups.items()}
    waits["embedding"] = mesh.embedding_group._get_backend(cpu).options._timeout
    assert set(waits.values()) == {timedelta(seconds=17)}, waits


def test_every_group_waits_as_long_as_the_world() -> None:
    run_distributed(check_timeouts, 8, collective_timeout_s=17.0)
