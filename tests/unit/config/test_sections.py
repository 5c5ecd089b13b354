"""The sections: strictness, and the few things they derive."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from megatron_glue.config.sections import (
    AcceleratorConfig,
    ActivationConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)


@pytest.mark.parametrize(
    ("section", "arguments"),
    [
        (ModelConfig, {"num_layers": "2"}),
        (ModelConfig, {"num_layers": True}),
        (ModelConfig, {"num_layers": 2.0}),
        (ModelConfig, {"swiglu": 1}),
        (ModelConfig, {"num_layer": 2}),
        (OptimizerConfig, {"lr": float("inf")}),
        (OptimizerConfig, {"lr": 0}),
        (AcceleratorConfig, {"cache_scope": "run"}),
    ],
)
def test_nothing_is_converted_or_ignored(section: type, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        section(**arguments)


def test_sections_are_frozen() -> None:
    with pytest.raises(ValidationError):
        RunConfig().model.num_layers = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_widths_follow_from_the_hidden_size() -> None:
    assert ModelConfig(hidden_size=256, num_attention_heads=4).head_dim == 64
    assert ModelConfig(kv_channels=48).head_dim == 48
    assert ModelConfig(num_query_groups=2).num_kv_heads == 2
    assert ModelConfig().num_kv_heads == 4
    assert ModelConfig(hidden_size=256).ffn_width == 704
    assert ModelConfig(hidden_size=192).ffn_width == 512
    assert ModelConfig(hidden_size=256, swiglu=False).ffn_width == 1024
    assert ModelConfig(ffn_hidden_size=100).ffn_width == 100


@pytest.mark.parametrize(
    ("skip", "windows"), [(None, [8, 8, 8, 8]), (2, [8, 0, 8, 0]), (4, [8, 8, 8, 0]), ((0, 1, 1, 0), [0, 8, 8, 0])]
)
def test_window_of_each_layer(skip: int | tuple[int, ...] | None, windows: list[int]) -> None:
    model = ModelConfig(window_size=8, window_attn_skip_freq=skip)
    assert [model.window_of_layer(layer) for layer in range(4)] == windows
    assert [ModelConfig(window_attn_skip_freq=skip).window_of_layer(layer) for layer in range(4)] == [0] * 4


@pytest.mark.parametrize(
    ("frequency", "layers"),
    [(1, [True] * 4), (2, [True, False, True, False]), ((0, 1, 1, 0), [False, True, True, False])],
)
def test_moe_layers(frequency: int | tuple[int, ...], layers: list[bool]) -> None:
    moe = MoEConfig(num_experts=8, moe_layer_freq=frequency)
    assert [moe.is_moe_layer(layer) for layer in range(4)] == layers
    assert not any(MoEConfig(moe_layer_freq=frequency).is_moe_layer(layer) for layer in range(4))


def test_what_double_buffer_and_offload_imply() -> None:
    double_buffer = RunConfig(training=TrainConfig(accelerator=AcceleratorConfig(enable_double_buffer=True)))
    assert double_buffer.offload
    assert double_buffer.recompute
    offload = RunConfig(activation=ActivationConfig(activation_offload=True))
    assert offload.offload
    assert offload.recompute
    modules = RunConfig(activation=ActivationConfig(offload_modules=("attn_core",)))
    assert modules.offload
    assert not modules.recompute
    recompute = RunConfig(activation=ActivationConfig(recompute_granularity="full"))
    assert recompute.recompute
    assert not recompute.offload
    assert not RunConfig().recompute
