from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_glue.config.loading import from_dict
from megatron_glue.training.telemetry.flops import ModelFlops, causal_pairs, peak_of_name, peak_tflops

MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 1, "ffn_hidden_size": 16}


def test_f117_active_experts_and_squares_of_documents_by_hand() -> None:
    """Two layers, the second with windows of 2: two documents of 3 and 5 tokens, two of four experts per token."""
    config = from_dict(
        {
            "model": {**MODEL, "window_size": 2, "window_attn_skip_freq": [0, 1]},
            "moe": {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 6, "moe_layer_freq": [0, 1]},
        }
    )
    attention = 8 * (8 + 4 + 4) + 8 * 8
    dense_ffn, experts, router = 3 * 8 * 16, 2 * 3 * 8 * 6, 8 * 4
    weights_of_token = 2 * attention + dense_ffn + experts + router + 8 * 100
    full_pairs = (1 + 2 + 3) + (1 + 2 + 3 + 4 + 5)
    windowed_pairs = (1 + 2 + 2) + (1 + 2 + 2 + 2 + 2)
    scores_and_sum = 2 * 2 * 8
    forward = 8 * 2 * weights_of_token + (full_pairs + windowed_pairs) * scores_and_sum
    assert ModelFlops(config, vocab_size=100).of_step(np.array([3, 5])) == 3 * forward


def test_shared_experts_are_active_and_gelu_has_two_products() -> None:
    moe = {"num_experts": 4, "moe_router_topk": 1, "moe_ffn_hidden_size": 6}
    plain = ModelFlops(from_dict({"model": {**MODEL, "swiglu": False}, "moe": moe}), 1)
    moe |= {"moe_shared_expert_intermediate_size": 10}
    shared = ModelFlops(from_dict({"model": {**MODEL, "swiglu": False}, "moe": moe}), 1)
    one = np.array([1])
    assert shared.of_step(one) - plain.of_step(one) == 3 * 2 * 2 * (2 * 8 * 10), "two layers, two products"


def test_one_document_is_more_than_its_parts() -> None:
    assert causal_pairs(np.array([8]), 0) == 36
    assert causal_pairs(np.array([4, 4]), 0) == 20
    assert causal_pairs(np.array([8]), 100) == 36
    assert causal_pairs(np.array([2**20]), 0) == 2**20 * (2**20 + 1) // 2, "no overflow"


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A100X", None),
        ("AMD Instinct MI300X", 1307.0),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_dense_peaks_by_name(name: str, tflops: float | None) -> None:
    assert peak_of_name(name) == tflops


def test_a_peak_that_is_given_counts_and_a_cpu_has_none() -> None:
    cpu = torch.device("cpu")
    assert peak_tflops(from_dict({"logging": {"peak_tflops": 0.5}}), cpu) == 0.5
    assert peak_tflops(from_dict({}), cpu) is None
    assert peak_tflops(from_dict({"training": {"precision": "fp32"}}), torch.device("cuda", 0)) is None
