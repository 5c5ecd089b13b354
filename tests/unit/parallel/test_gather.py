"""Whole tensors in one process: names and copies. Several ranks: tests/distributed/parallel/test_data_parallel.py."""

from __future__ import annotations

import torch
from torch import nn

from megatron_glue.parallel.gather import differing_replicas, gather_full_gradients, gather_full_parameters
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
