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
from megatron_glue.ops.ranges import named_range, put_range
from megatron_glue.parallel.data_parallel import DataParallelEngine

PHASES = (
    "data wait",
    "forward",
    "attention",
    "ffn",
    "moe",
    "router",
    "dispatch",
    "exchange",
    "experts",
    "backward",
    "reduce",
    "clip",
    "optimizer",
)
"""All names, in the order of a step. ``ffn`` is a dense feed-forward or a shared expert, ``moe`` a whole MoE layer,
``dispatch`` grouping, permutation and the launch of rows, ``exchange`` all from there to the combined results."""

_OF_MODULES: dict[type[nn.Module], dict[str, str]] = {
    GPT: {"forward": "forward"},
    PackedAttention: {"forward": "attention"},
    FeedForward: {"forward": "ffn"},
    MoELayer: {"forward": "moe"},
    Router: {"forward": "router"},
    GroupedExperts: {"compute": "experts", "compute_slices": "experts", "forward_by_mask": "experts"},
}
_OF_DISPATCHES = {"send": "dispatch", "run": "exchange"}


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
    use_nvtx = device.type == "cuda"
    places = [
        (loader, "next_step", "data wait"),
        *_places_in_model(built),
        (engine, "backward", "backward"),
        (engine, "finish_backward", "reduce"),
        (engine, "clip_gradients", "clip"),
        (optimizer, "step", "optimizer"),
    ]
    for owner, method, name in places:
        put_range(owner, method, name, use_nvtx=use_nvtx)
    for dispatcher in _dispatchers(built):
        _name_dispatches(dispatcher, use_nvtx)


def _places_in_model(built: BuiltModel) -> Iterator[tuple[Any, str, str]]:
    """Yield each module, its method, and the phase that this is."""
    for part in built.parts:
        for module in part.modules():
            for kind, names in _OF_MODULES.items():
                if isinstance(module, kind):
                    yield from ((module, method, name) for method, name in names.items())


def _dispatchers(built: BuiltModel) -> list[Any]:
    """Each dispatcher once: layers may share one."""
    layers = (module for part in built.parts for module in part.modules() if isinstance(module, MoELayer))
    return list({id(layer.dispatcher): layer.dispatcher for layer in layers}.values())


def _name_dispatches(dispatcher: Any, use_nvtx: bool) -> None:
    """A dispatch is an object of its own, made anew for each call of a layer."""
    begin = dispatcher.begin

    def begin_named(*args: Any, **kwargs: Any) -> Any:
        with named_range("dispatch", use_nvtx=use_nvtx):
            dispatch = begin(*args, **kwargs)
        for method, name in _OF_DISPATCHES.items():
            put_range(dispatch, method, name, use_nvtx=use_nvtx)
        return dispatch

    dispatcher.begin = begin_named
