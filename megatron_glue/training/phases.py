"""Names the phases of a training step for profilers (``--nvtx-ranges``); nothing of it exists while they are off.

Ranges are put around methods of the objects that a session consists of. In backward, the phases of layers appear
where a recompute runs them again; operators of autograd itself stand under ``backward``, and torch.profiler links each
of them to its forward operator. In a pipeline, torch's schedule names each micro-batch's passes.

Stands beside the training step, which it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from megatron_glue.data.loader import BatchLoader
from megatron_glue.layers.attention import PackedAttention
from megatron_glue.layers.mlp import FeedForward
from megatron_glue.models.build import BuiltModel
from megatron_glue.models.gpt import GPT
from megatron_glue.moe.experts import GroupedExperts
from megatron_glue.moe.layer import MoELayer
from megatron_glue.moe.router import Router
from megatron_glue.ops.ranges import put_range
from megatron_glue.parallel.data_parallel import DataParallelEngine

PHASES = (
    "data wait",
    "forward",
    "attention",
    "ffn",
    "moe",
    "router",
    "dispatch",
    "experts",
    "combine",
    "backward",
    "reduce",
    "clip",
    "optimizer",
)
"""All names, in the order of a step. ``ffn`` is a dense feed-forward or a shared expert, ``moe`` a whole MoE layer."""

_OF_MODULES: dict[type[nn.Module], dict[str, str]] = {
    GPT: {"forward": "forward"},
    PackedAttention: {"forward": "attention"},
    FeedForward: {"forward": "ffn"},
    MoELayer: {"forward": "moe"},
    Router: {"forward": "router"},
    GroupedExperts: {"forward": "experts", "forward_by_mask": "experts", "forward_by_slice": "experts"},
}
_OF_DISPATCHERS = {"start_dispatch": "dispatch", "finish_dispatch": "dispatch", "combine": "combine"}


def name_phases(
    built: BuiltModel,
    loader: BatchLoader,
    engine: DataParallelEngine,
    optimizer: Any,
    device: torch.device,
) -> None:
    """Put a range around every phase of a session's steps, once.

    Args:
        built: The session's model.
        loader: Its batches.
        engine: Around the model.
        optimizer: Its ``step`` is the update.
        device: On a GPU the ranges are NVTX ranges too.
    """
    places = [
        (loader, "next_step", "data wait"),
        *_places_in_model(built),
        (engine, "backward", "backward"),
        (engine, "finish_backward", "reduce"),
        (engine, "clip_gradients", "clip"),
        (optimizer, "step", "optimizer"),
    ]
    for owner, method, name in places:
        put_range(owner, method, name, use_nvtx=device.type == "cuda")


def _places_in_model(built: BuiltModel) -> Iterator[tuple[Any, str, str]]:
    """Yield each object, its method, and the phase that this is."""
    dispatchers: dict[int, Any] = {}
    for part in built.parts:
        for module in part.modules():
            for kind, names in _OF_MODULES.items():
                if isinstance(module, kind):
                    yield from ((module, method, name) for method, name in names.items())
            if isinstance(module, MoELayer):
                # Layers may share one.
                dispatchers[id(module.dispatcher)] = module.dispatcher
    for dispatcher in dispatchers.values():
        yield from ((dispatcher, method, name) for method, name in _OF_DISPATCHERS.items())
