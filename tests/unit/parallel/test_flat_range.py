"""A range of a flattened parameter, and the parameter it belongs to."""

from __future__ import annotations

import torch
from torch import nn

from megatron_glue.parallel.flat_range import FlatRange, get_master, set_master
from megatron_glue.parallel.gather import gather_full_parameters
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import ShardSpec, set_shard_spec


def test_a_range_fills_its_place_of_the_whole() -> None:
    whole = FlatRange(torch.tensor([5.0, 6.0]), 3).whole((2, 3), None)
    assert whole.tolist() == [[0.0, 0.0, 0.0], [5.0, 6.0, 0.0]]
    assert FlatRange(torch.empty(0), 0).whole((2,), None).tolist() == [0.0, 0.0]


def test_masters_are_the_values_of_a_parameter_that_holds_none() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(0))
    set_shard_spec(module.weight, ShardSpec("weight", (2, 2)))
    assert get_master(module.weight) is None
    set_master(module.weight, FlatRange(torch.arange(4.0), 0))
    assert gather_full_parameters(module, ParallelMesh())["weight"].tolist() == [[0.0, 1.0], [2.0, 3.0]]
