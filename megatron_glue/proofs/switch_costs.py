"""Measures what one layer pays for what the three optimisations remove, on a session's own model and batch.

Counters of the session are left as they were, and gradients untouched. The figures go into ``switch_model.py``.

Shape suffixes: T tokens, D model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import torch

from megatron_glue.layers.packed_metadata import PackedMetadataCache
from megatron_glue.moe.layer import MoELayer
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.proofs.switch_model import LayerCosts, StepShape
from megatron_glue.training.metrics import StepTimer
from megatron_glue.training.session import Session
from megatron_glue.training.step import step_inputs
from megatron_glue.types import ForwardContext, PackedBatch

NUM_BUILDS, NUM_PASSES = 20, 3


def shape_of(session: Session) -> StepShape:
    """How often a step of this rank pays the costs of a layer."""
    config = session.config
    layers = [
        layer for stage in session.built.plan.stages_of(session.mesh.pp_rank) for layer in _layers(session, stage)
    ]
    return StepShape(
        num_layers=len(layers),
        num_moe_layers=sum(config.moe.is_moe_layer(layer) for layer in layers),
        num_micro_batches=session.data.loader.num_micro_batches,
        is_recomputed=config.recompute,
    )


def measure_costs(session: Session, batch: PackedBatch) -> LayerCosts:
    """Measure build and grouping, and take the copies from what the session has counted so far.

    Args:
        session: After some steps; reloads are those since its statistics were last reset.
        batch: One of its micro-batches.

    Returns:
        Medians for the first and second, means for the copies.
    """
    stats = session.built.activation.stats()
    with session.uncounted():
        build_ms = _build_ms(session, batch)
        loop_ms, one_pass_ms = _grouping_ms(session, batch)
    if not stats.num_reloads:
        return LayerCosts(build_ms, None, None, loop_ms, one_pass_ms)
    num_backwards = stats.num_reloads + stats.num_residents
    return LayerCosts(
        build_ms, stats.copy_ms / stats.num_reloads, stats.compute_ms / num_backwards, loop_ms, one_pass_ms
    )


def _layers(session: Session, stage: int) -> range:
    return session.built.plan.layers[stage]


def _build_ms(session: Session, batch: PackedBatch) -> float:
    """Mean over the layers of one build as a layer without the cache makes it, from the batch's device tensors."""
    used, model = session.built.metadata_cache, session.config.model
    cache = PackedMetadataCache(used.layout, False, HostReader(), used.context_layout)
    windows = [model.window_of_layer(layer) for layer in range(model.num_layers)]

    def build_all() -> None:
        for window in windows:
            cache.for_sequence(batch.sequence, window)

    return _median_ms(build_all, NUM_BUILDS, session.device) / len(windows)


def _grouping_ms(session: Session, batch: PackedBatch) -> tuple[float | None, float | None]:
    """One MoE layer, forward and backward (and forward again if it is recomputed): with masks, and in one pass."""
    layers = [module for part in session.built.parts for module in part.modules() if isinstance(module, MoELayer)]
    # On several ranks weights are sharded, and a loop's cost depends on what others send.
    if not layers or session.mesh.world_size > 1:
        return None, None
    layer, own = layers[0], layers[0].config
    ((_, context),) = step_inputs(session, [batch])
    times = []
    try:
        for is_one_pass in (False, True):
            layer.config = replace(own, one_pass=is_one_pass)
            times.append(_median_ms(lambda: _run_layer(session, layer, batch, context), NUM_PASSES, session.device))
    finally:
        layer.config = own
    return times[0], times[1]


def _run_layer(session: Session, layer: MoELayer, batch: PackedBatch, context: ForwardContext) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (batch.sequence.num_tokens, session.config.model.hidden_size)
    x_TD = torch.randn(shape, generator=generator).to(session.device, session.built.precision.compute_dtype)
    x_TD.requires_grad_()
    if session.config.recompute:
        with torch.no_grad():
            layer(x_TD, context)
    out_TD = layer(x_TD, context)
    weights = [weight for weight in layer.parameters() if weight.requires_grad]
    # Into no .grad: those are the session's.
    torch.autograd.grad(out_TD, [x_TD, *weights], x_TD.detach(), allow_unused=True)


def _median_ms(function: Callable[[], None], num_times: int, device: torch.device) -> float:
    """Median time of a call that has ended on the device; the first call is left out."""
    timer = StepTimer(device)
    times = []
    for _ in range(num_times + 1):
        timer.start()
        function()
        times.append(1e3 * timer.stop(wait_for_device=True))
    return statistics.median(times[1:])
