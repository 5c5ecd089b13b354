"""Selective recompute in whole models: memory by module, and what is decided once is not decided again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_glue.config.loading import from_dict
from megatron_glue.config.sections import RECOMPUTE_MODULES
from megatron_glue.models.build import BuildPlace, build_model
from megatron_glue.moe import layer as moe_layer
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.types import ForwardContext, PackedBatch, PackedSequence
from tests.support.alive_storages import AliveStorages

NUM_LAYERS, TOKENS, HIDDEN, HEADS, EXPERTS, TOP_K, FFN = 2, 96, 32, 4, 4, 2, 24
FP32_BYTES = 4


def run(
    modules: tuple[str, ...], folder: Path, grouped_mm: str = "torch"
) -> tuple[int, int, list[torch.Tensor | None]]:
    """Bytes alive behind forward, builds of metadata, and gradients, of a dense layer and an MoE layer."""
    activation = {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
    config = from_dict(
        {
            "model": {"num_layers": NUM_LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS},
            "moe": {
                "num_experts": EXPERTS,
                "moe_router_topk": TOP_K,
                "moe_ffn_hidden_size": FFN,
                "moe_layer_freq": (0, 1),
            },
            "data": {"seq_length": TOKENS},
            "backend": {"attention_backend": "dense", "grouped_mm_backend": grouped_mm},
            "training": {"accelerator": {"enable_metadata_cache": True}},
            "activation": activation,
        }
    )
    built = build_model(
        config, 64, BuildPlace(ParallelMesh.build(config.parallel, "cpu"), torch.device("cpu"), HostReader(), folder)
    )
    sequence = PackedSequence.from_lengths([40, 50], num_pad_tokens=6)
    ids_T = torch.arange(TOKENS) % 64
    batch, context = PackedBatch(ids_T, ids_T.roll(-1), sequence, 90), ForwardContext(sequence)
    with AliveStorages() as alive:
        loss = built.model(batch, context)
        num_bytes = alive.num_bytes
    loss.backward()
    return num_bytes, built.metadata_cache.builds, [param.grad for param in built.model.parameters()]


def test_each_module_saves_what_it_should_and_decides_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groupings = []
    group_tokens = moe_layer.group_tokens
    monkeypatch.setattr(moe_layer, "group_tokens", lambda *args, **kw: groupings.append(1) or group_tokens(*args, **kw))
    everything, builds, expected = run((), tmp_path)
    assert builds == 1
    num_rows = 90 * TOP_K
    least_saved = {
        "core_attn": NUM_LAYERS * TOKENS**2 * FP32_BYTES,  # the mask in the dtype of the kernel
        "mlp": TOKENS * HIDDEN * FP32_BYTES,
        "moe": num_rows * (3 * FFN + HIDDEN) * FP32_BYTES,
        "layernorm": 2 * NUM_LAYERS * TOKENS * HIDDEN * FP32_BYTES,
        "moe_act": num_rows * FFN * FP32_BYTES,
    }
    for modules in (*((name,) for name in RECOMPUTE_MODULES), RECOMPUTE_MODULES):
        groupings.clear()
        kept, builds, gradients = run(modules, tmp_path)
        least = max(least_saved[name] for name in modules)
        assert everything - kept >= least, (modules, everything - kept, least)
        if modules in (("layernorm",), ("moe_act",)):
            assert everything - kept == least, "exactly its results"
        assert builds == 1, "metadata of the micro-batch serves recompute too"
        assert len(groupings) == 1, "the routing decision is reused"
        for actual, wanted in zip(gradients, expected, strict=True):
            assert (actual is None and wanted is None) or torch.equal(actual, wanted), modules


def test_experts_stay_one_function_beside_other_modules(tmp_path: Path) -> None:
    """It keeps no result of the nonlinearity, and the choice of another module must not bring that back."""
    kept = {name: run(("core_attn",), tmp_path, name)[0] for name in ("torch", "cores")}
    assert kept["torch"] - kept["cores"] >= 90 * TOP_K * FFN * FP32_BYTES
