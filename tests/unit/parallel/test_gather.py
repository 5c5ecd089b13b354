"""Whole tensors in one process: names and copies. Several ranks: tests/distributed/parallel/test_data_parallel.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from megatron_glue.parallel.gather import (
    StagesDifferError,
    differing_replicas,
    gather_full_gradients,
    gather_full_parameters,
    merge_stages,
)
from megatron_glue.parallel.managed_block import ManagedBlock
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import ShardSpec, set_shard_spec

MESH = ParallelMesh()


def test_names_and_values() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([ManagedBlock(nn.Linear(2, 3), lambda b, x, c: b(x))])})
    layer = model["blocks"][0].managed
    set_shard_spec(layer.bias, ShardSpec("renamed", (3,)))
    layer.weight.grad = torch.ones(3, 2)
    assert gather_full_gradients(model, MESH).keys() == {"blocks.0.weight"}
    whole = gather_full_parameters(model, MESH)
    assert whole.keys() == {"blocks.0.weight", "renamed"}
    before = whole["renamed"].clone()
    with torch.no_grad():
        layer.bias.add_(1)
    assert torch.equal(whole["renamed"], before), "gathered tensors are copies"
    assert differing_replicas(model, MESH) == []


def test_stages_that_share_a_tensor_must_hold_the_same_bits() -> None:
    tied, stages = torch.tensor([1.0, math.nan]), [{"first": torch.ones(1)}, {"last": torch.zeros(())}]
    merged = merge_stages([stages[0] | {"tied": tied}, {}, stages[1] | {"tied": tied.clone()}])
    assert merged.keys() == {"first", "tied", "last"}
    assert merged["tied"] is tied


@pytest.mark.parametrize(
    "other",
    [torch.tensor([0.0, 2.0]).double(), torch.tensor([-0.0, 2.0]), torch.tensor([[0.0, 2.0]])],
    ids=["dtype", "sign of zero", "shape"],
)
def test_other_bits_on_another_stage_are_named(other: Tensor) -> None:
    stages = [{}, {"tied": torch.tensor([0.0, 2.0])}, {"tied": other}]
    with pytest.raises(StagesDifferError, match="tied is not the same on pipeline stages 1 and 2"):
        merge_stages(stages)
