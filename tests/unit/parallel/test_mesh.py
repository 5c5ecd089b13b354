"""The mesh of one process, and what it refuses. Meshes of several ranks: tests/distributed/parallel/test_mesh.py."""

from __future__ import annotations

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import ParallelConfig
from megatron_glue.parallel.mesh import ParallelMesh


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
        mesh.data_mesh,
        mesh.expert_data_mesh,
    ):
        assert absent is None


def test_experts_cannot_be_split_over_more_ranks_than_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--expert-model-parallel-size=2: does not divide the 1 data-parallel ranks"):
        ParallelMesh.build(ParallelConfig(expert_model_parallel_size=2), "cpu")


@pytest.mark.parametrize(
    "field",
    [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_tensor_parallel_size",
    ],
)
def test_axes_without_a_technique_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}=2"):
        ParallelMesh.build(ParallelConfig(**{field: 2}), "cpu")
