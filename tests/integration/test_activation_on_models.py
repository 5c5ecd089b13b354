"""Whole GPT and MoE models: recompute and offload change no gradient bit and count each router once (F45, F48, F50)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_glue.config.sections import RECOMPUTE_MODULES, RunConfig
from megatron_glue.models.build import BuildPlace, build_model
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.types import ForwardContext, PackedBatch, PackedSequence

MODELS = {
    "gpt": {},
    "moe": {"moe": {"num_experts": 4, "moe_shared_expert_intermediate_size": 16, "moe_layer_freq": 2}},
}
TECHNIQUES = {
    "recompute": {"activation": {"recompute_granularity": "full"}},
    "first block recomputed": {
        "activation": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    },
    "offload": {"activation": {"activation_offload": True, "activation_debug_poison": True}},
    "every second input offloaded": {
        "activation": {"activation_offload": True, "activation_debug_poison": True, "offload_num_layers": 1}
    },
    "modules offloaded": {
        "activation": {
            "offload_modules": ("attn_core", "mlp_act", "moe_act"),
            "offload_min_tensor_kb": 0,
            "activation_debug_poison": True,
        }
    },
    "first block recomputed, modules of the others offloaded": {
        "activation": {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 1,
            "offload_modules": ("attn_core",),
            "offload_min_tensor_kb": 1,
        },
        "training": {"accelerator": {"enable_double_buffer": True}},
    },
    **{
        f"{module} recomputed": {
            "activation": {"recompute_granularity": "selective", "recompute_modules": (module,)},
            "training": {"accelerator": {"enable_metadata_cache": True}},
        }
        for module in RECOMPUTE_MODULES
    },
    "all modules recomputed": {
        "activation": {"recompute_granularity": "selective", "recompute_modules": RECOMPUTE_MODULES}
    },
    "norms and feed-forward recomputed, attention offloaded": {
        "activation": {
            "recompute_granularity": "selective",
            "recompute_modules": ("layernorm", "mlp", "moe_act"),
            "offload_modules": ("attn_core",),
            "offload_min_tensor_kb": 0,
            "activation_debug_poison": True,
        }
    },
    "double buffer": {"training": {"accelerator": {"enable_double_buffer": True, "enable_metadata_cache": True}}},
}


def run(sections: dict, folder: Path) -> tuple[list[torch.Tensor | None], list[list[int]]]:
    """Gradients of two micro-batches with dropout, and the counts that routers logged."""
    config = RunConfig(
        model={"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "hidden_dropout": 0.1},
        data={"seq_length": 64},
        **sections,
    )
    place = BuildPlace(ParallelMesh.build(config.parallel, "cpu"), torch.device("cpu"), HostReader(), folder)
    built = build_model(config, 100, place)
    ids_T = torch.randint(0, 100, (64,), generator=torch.Generator().manual_seed(1))
    labels_T = ids_T.roll(-1)
    labels_T[[19, 49, 59, 60, 61, 62, 63]] = -100
    log = []
    built.activation.begin_step()
    for micro_batch in range(2):
        sequence = PackedSequence.from_lengths([20, 30, 10], num_pad_tokens=4)
        context = ForwardContext(sequence, micro_batch=micro_batch, router_log=log)
        loss = built.model(PackedBatch(ids_T, labels_T, sequence, 57), context)
        built.activation.managers[0].end_forward()
        loss.backward()
    stats = built.activation.stats()
    assert (stats.num_offloads > 0) == config.offload
    assert stats.num_reloads == stats.num_offloads
    built.activation.close()
    return [param.grad for param in built.model.parameters()], [record.counts_E.tolist() for record in log]


@pytest.mark.parametrize("model", MODELS)
def test_gradients_and_counters_are_those_without_recompute(model, tmp_path):
    expected_grads, expected_counts = run(MODELS[model], tmp_path)
    assert bool(expected_counts) == (model == "moe")
    for technique, sections in TECHNIQUES.items():
        grads, counts = run({**MODELS[model], **sections}, tmp_path)
        assert counts == expected_counts, technique
        for actual, expected in zip(grads, expected_grads, strict=True):
            assert (actual is None and expected is None) or torch.equal(actual, expected), technique
