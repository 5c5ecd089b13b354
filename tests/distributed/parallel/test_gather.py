"""Replicas that drifted apart are named; experts of other ranks are not replicas."""

from __future__ import annotations

import torch

from megatron_glue.config.sections import ParallelConfig
from megatron_glue.parallel.gather import differing_replicas, gather_full_parameters
from megatron_glue.parallel.mesh import ParallelMesh
from tests.support.processes import run_distributed
from tests.support.toy_moe import ToyModel


def find_drift(rank: int, world_size: int) -> None:
    mesh = ParallelMesh.build(ParallelConfig(expert_model_parallel_size=2), "cpu")
    model = ToyModel(mesh)
    assert differing_replicas(model, mesh) == []
    whole = gather_full_parameters(model, mesh)
    single = gather_full_parameters(ToyModel(ParallelMesh()), ParallelMesh())
    assert whole.keys() == single.keys()
    assert all(torch.equal(whole[name], single[name]) for name in single)
    block = model.blocks[1].managed
    with torch.no_grad():
        if rank == 3:
            block.experts.up[1, 2, 3].add_(1e-6)
        if rank == 1:
            block.mix.copy_(block.mix.flip(0))
    differing = ["blocks.1.experts.up (ranks 1, 3)", "blocks.1.mix (ranks 0, 1, 2, 3)"]
    assert sorted(differing_replicas(model, mesh)) == differing


def test_drifted_replicas_are_named_on_every_rank() -> None:
    run_distributed(find_drift, 4)
