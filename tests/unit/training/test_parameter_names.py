"""Names of parameters under wrappers and shards."""

from __future__ import annotations

import torch
from torch import nn

from megatron_glue.parallel.shard_spec import ShardSpec, set_shard_spec
from megatron_glue.training.parameter_names import global_name


def test_wrappers_leave_no_trace() -> None:
    param = nn.Parameter(torch.zeros(2, 3))
    assert global_name("module.blocks.0.managed._orig_mod.norm.weight", param) == "blocks.0.norm.weight"


def test_a_spec_has_the_last_word() -> None:
    param = nn.Parameter(torch.zeros(2, 3))
    set_shard_spec(param, ShardSpec("blocks.7.experts.up", (4, 3), (("ep", 0),)))
    assert global_name("module.blocks.0.experts.up", param) == "blocks.7.experts.up"
