"""The entry points' own defaults: what a run is when no flag is given. Tools measure the same models."""

from __future__ import annotations

from megatron_glue.config.sections import MoEConfig, RunConfig, TrainConfig

GPT_DEFAULTS = RunConfig(training=TrainConfig(name="pretrain_gpt"))
"""A small dense decoder."""

MOE_DEFAULTS = RunConfig(
    training=TrainConfig(name="pretrain_moe"),
    moe=MoEConfig(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=256),
)
"""The same decoder with eight experts per layer, two of them per token."""
