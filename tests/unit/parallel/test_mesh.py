"""The mesh of one process, and what it refuses. Meshes of several ranks: tests/distributed/parallel/test_mesh.py."""

from __future__ import annotations

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import ParallelConfig
from megatron_glue.parallel.mesh import ParallelMesh, axis_sizes_of


def test_one_process_needs_no_process_group() -> None:
    mesh = ParallelMesh.build(ParallelConfig(), "cpu")
    assert (mesh.world_size, mesh.dp_size, mesh.ep_size, mesh.edp_size, mesh.tp_size, mesh.pp_size, mesh.cp_size) == (
        1,
    ) * 7
    assert (mesh.rank, mesh.dp_rank, mesh.ep_rank, mesh.edp_rank) == (0,) * 4
    for absent in (
        mesh.dp_group,
        mesh.ep_group,
        mesh.edp_group,
        mesh.world_group,
        mesh.fsdp_mesh,
    ):
        assert absent is None


def test_experts_cannot_be_split_over_more_ranks_than_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--expert-model-parallel-size=2: does not divide the 1 data-parallel ranks"):
        ParallelMesh.build(ParallelConfig(expert_model_parallel_size=2), "cpu")


@pytest.mark.parametrize(
    ("parallel", "world_size", "flag"),
    [
        ({"tensor_model_parallel_size": 2}, 3, "WORLD_SIZE"),
        ({"pipeline_model_parallel_size": 2, "context_parallel_size": 2}, 6, "WORLD_SIZE"),
        ({"expert_tensor_parallel_size": 2}, 1, "--expert-tensor-parallel-size"),
        ({"expert_model_parallel_size": 2, "tensor_model_parallel_size": 3}, 3, "--expert-model-parallel-size"),
        ({"num_distributed_optimizer_instances": 3}, 4, "--num-distributed-optimizer-instances"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(parallel: dict[str, int], world_size: int, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        axis_sizes_of(ParallelConfig(**parallel), world_size)


def test_kv_heads_and_tensor_ranks_must_divide_each_other() -> None:
    with pytest.raises(ConfigError, match="multiple of the 3 KV heads"):
        axis_sizes_of(ParallelConfig(tensor_model_parallel_size=4), 4, num_kv_heads=3)


def test_few_kv_heads_split_the_tensor_axis_in_two() -> None:
    _, dense, _ = axis_sizes_of(ParallelConfig(tensor_model_parallel_size=8), 8, num_kv_heads=2)
    assert (dense["tp"], dense["kv_copy"]) == (2, 4)
    _, dense, _ = axis_sizes_of(ParallelConfig(tensor_model_parallel_size=8), 8, num_kv_heads=16)
    assert (dense["tp"], dense["kv_copy"]) == (8, 1)


def test_experts_fold_over_all_ranks_of_a_stage() -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=2,
    )
    token, dense, expert = axis_sizes_of(parallel, 16)
    assert token == {"pp": 2, "dp": 2, "cp": 2, "tensor": 2}
    assert dense == {"pp": 2, "dp_replicate": 2, "fsdp": 2, "tp": 2, "kv_copy": 1}
    assert expert == {"pp": 2, "edp": 1, "ep": 4, "etp": 2}


def test_sharded_weights_may_have_replicas() -> None:
    parallel = ParallelConfig(
        data_parallel_engine="fsdp2", num_distributed_optimizer_instances=2, context_parallel_size=2
    )
    _, dense, _ = axis_sizes_of(parallel, 8)
    assert (dense["dp_replicate"], dense["fsdp"]) == (2, 4)
