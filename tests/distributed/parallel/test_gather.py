"""Replicas that drifted apart are named, also a tied weight on two stages; experts of other ranks are no replicas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_glue.config.sections import ParallelConfig
from megatron_glue.parallel.gather import (
    StagesDifferError,
    differing_replicas,
    gather_full_gradients,
    gather_full_parameters,
)
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


def gather_tied(rank: int, world_size: int) -> None:
    mesh = ParallelMesh.build(ParallelConfig(pipeline_model_parallel_size=2), "cpu")
    model = nn.ModuleDict({"tied": nn.Linear(3, 3, bias=False), f"of_{rank}": nn.Linear(1, 1)})
    with torch.no_grad():
        model["tied"].weight.fill_(2.0)
    model["tied"].weight.grad = torch.ones(3, 3)
    own = ["of_0.bias", "of_0.weight", "of_1.bias", "of_1.weight"]
    assert sorted(gather_full_parameters(model, mesh)) == [*own, "tied.weight"]
    assert sorted(gather_full_gradients(model, mesh)) == ["tied.weight"]
    if rank == 0:
        model["tied"].weight.grad[1, 1] += 1e-6
        with torch.no_grad():
            model["tied"].weight[2, 2] += 1e-6
    # The last stage's copy is right, so that whoever takes the last one sees nothing.
    for gather in (gather_full_parameters, gather_full_gradients):
        with pytest.raises(StagesDifferError, match=r"tied.weight is not the same on pipeline stages 0 and 1"):
            gather(model, mesh)


def test_a_tied_weight_that_differs_between_stages_is_named_on_every_rank() -> None:
    run_distributed(gather_tied, 2)
