"""Specs of parameters: shapes, placements, and what counts as an expert parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from megatron_glue.parallel.shard_spec import ShardSpec, get_shard_spec, is_expert_parameter, set_shard_spec

EXPERTS = ShardSpec("experts.w", (8, 4, 6), (("ep", 0),))


def test_local_shape_and_placements() -> None:
    assert EXPERTS.local_shape({"ep": 4}) == (2, 4, 6)
    assert EXPERTS.placements(("edp", "ep")) == (Replicate(), Shard(0))
    assert ShardSpec("w", (3,)).placements(("dp",)) == (Replicate(),)


def test_uneven_split_is_refused_with_name_and_sizes() -> None:
    with pytest.raises(ValueError, match=r"experts\.w: dim 0 .* ep=3"):
        EXPERTS.local_shape({"ep": 3})


def test_split_of_a_missing_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="dim 3"):
        ShardSpec("w", (8, 4, 6), (("ep", 3),))


def test_expert_parameters_are_known_by_their_spec() -> None:
    expert, dense = nn.Parameter(torch.zeros(8, 4, 6)), nn.Parameter(torch.zeros(3))
    set_shard_spec(expert, EXPERTS)
    set_shard_spec(dense, ShardSpec("w", (3,)))
    assert get_shard_spec(expert) is EXPERTS
    assert is_expert_parameter(expert)
    assert not is_expert_parameter(dense)
    assert not is_expert_parameter(nn.Parameter(torch.zeros(3)))
