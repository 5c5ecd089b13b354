"""How much arithmetic a step is, and how much a device could do: what model FLOPs utilisation is made of.

Counted is what the model needs, not what a run does: a multiplication and an addition per weight and live token in
forward, twice that in backward; the experts that a token goes to, not those it does not; attention over the pairs that
a document's mask lets through, which is a sum over squares of document lengths, cut by windows. Padding and recompute
are not in it. (Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B, defines the quotient.)

Shape suffixes: S segments.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from megatron_glue.activation.device_api import device_name
from megatron_glue.config.sections import ModelConfig, RunConfig

DENSE_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("A10", 125.0),
    ("MI325X", 1307.0),
    ("MI300X", 1307.0),
    ("MI250X", 383.0),
)
"""Part of a device's name -> dense bf16 TFLOP/s of its vendor's data sheet. The first that fits counts, so longer names
stand in front. Vendors like to print the double, for weights of which half are zero; that is not what training does."""


def peak_tflops(config: RunConfig, device: torch.device) -> float | None:
    """The dense peak of a device for the run's compute type.

    Args:
        config: ``--peak-tflops`` comes before the table.
        device: Where this rank computes.

    Returns:
        TFLOP/s; ``None`` if it is not known: a device that the table lacks, or fp32, whose peak depends on settings.
    """
    if config.logging.peak_tflops is not None:
        return config.logging.peak_tflops
    if device.type != "cuda" or config.training.precision == "fp32":
        return None
    return peak_of_name(device_name(device))


def peak_of_name(name: str) -> float | None:
    """Look a device's name up in :data:`DENSE_TFLOPS`."""
    words = name.replace("-", " ").split()
    for known, tflops in DENSE_TFLOPS:
        parts = known.split()
        if any(words[begin : begin + len(parts)] == parts for begin in range(len(words))):
            return tflops
    return None


class ModelFlops:
    """Arithmetic of a model's training steps.

    Args:
        config: The run's configuration.
        vocab_size: Columns of the output layer.
    """

    def __init__(self, config: RunConfig, vocab_size: int) -> None:
        model = config.model
        layers = range(model.num_layers)
        self._of_token = 2 * model.hidden_size * vocab_size
        self._of_token += sum(_attention_weights(model) + _feed_forward_weights(config, layer) for layer in layers) * 2
        # Scores and weighted sum: a multiplication and an addition for each, per pair and element of the heads.
        self._of_pair = 4 * model.num_attention_heads * model.head_dim
        self._windows = Counter(map(model.window_of_layer, layers))

    def of_step(self, lengths_S: np.ndarray) -> int:
        """Floating-point operations of forward and backward.

        Args:
            lengths_S: int64. Tokens of every segment of the step, over all ranks.
        """
        num_pairs = sum(count * causal_pairs(lengths_S, window) for window, count in self._windows.items())
        return 3 * (int(lengths_S.sum()) * self._of_token + num_pairs * self._of_pair)


def causal_pairs(lengths_S: np.ndarray, window: int) -> int:
    """How many (query, key) pairs causal attention has inside of segments.

    Args:
        lengths_S: int64. Tokens of each segment.
        window: Most keys of a query, itself included; off: 0.
    """
    reach_S = np.minimum(lengths_S, window) if window else lengths_S
    return int((reach_S * (reach_S + 1) // 2 + (lengths_S - reach_S) * reach_S).sum())


def _attention_weights(model: ModelConfig) -> int:
    queries, keys = model.num_attention_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return model.hidden_size * (queries + 2 * keys) + queries * model.hidden_size


def _feed_forward_weights(config: RunConfig, layer: int) -> int:
    """Weights of a layer's feed-forward that a token meets."""
    model, moe = config.model, config.moe
    num_products = 3 if model.swiglu else 2
    if not moe.is_moe_layer(layer):
        return num_products * model.hidden_size * model.ffn_width
    width = moe.moe_router_topk * (moe.moe_ffn_hidden_size or model.ffn_width)
    width += moe.moe_shared_expert_intermediate_size
    return num_products * model.hidden_size * width + model.hidden_size * moe.num_experts
