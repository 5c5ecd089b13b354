"""What each of the three optimisations should gain, from a few measured costs; pure arithmetic.

For one micro-batch of L layers:

* metadata cache: built once instead of per layer, (L - 1) * s, and L * s more where blocks are recomputed, with s the
  cost of one build;
* double buffer: (L - 1) * min(c, g), with c the copy of one block's input and g the compute of one block's recompute
  and backward; the first copy has nothing to hide behind;
* one-pass grouping: (loop - one pass) per MoE layer, both measured, forward and backward.

It measures nothing (``switch_costs.py`` does) and knows no session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerCosts:
    """Costs of one layer and micro-batch in milliseconds; ``None`` where there is nothing to measure.

    Attributes:
        build_ms: One build of attention metadata (s).
        copy_ms: Bringing one block's input back (c).
        compute_ms: Recompute and backward of one block (g).
        loop_ms: One MoE layer with one mask per expert, all its passes.
        one_pass_ms: The same layer with one-pass grouping.
    """

    build_ms: float | None = None
    copy_ms: float | None = None
    compute_ms: float | None = None
    loop_ms: float | None = None
    one_pass_ms: float | None = None


@dataclass(frozen=True)
class StepShape:
    """How often a step pays them on one rank.

    Attributes:
        num_layers: Blocks of this rank.
        num_moe_layers: Those with experts.
        num_micro_batches: Per step.
        is_recomputed: Whether backward runs blocks again.
    """

    num_layers: int
    num_moe_layers: int
    num_micro_batches: int
    is_recomputed: bool


@dataclass(frozen=True)
class Expectation:
    """What one switch does to a step.

    Attributes:
        switch: Its flag.
        is_on: Whether the step had it.
        gain_ms: Time that it saves per step; ``None`` where it has nothing to work on.
        formula: How that was computed, with numbers; or why it was not.
        ratio: Step time without it / step time with it.
    """

    switch: str
    is_on: bool
    gain_ms: float | None
    formula: str
    ratio: float | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "switch": self.switch,
            "is_on": self.is_on,
            "gain_ms": self.gain_ms,
            "ratio": self.ratio,
            "formula": self.formula,
        }


def expectations(
    costs: LayerCosts, shape: StepShape, step_ms: float, *, has_cache: bool, has_double_buffer: bool, has_one_pass: bool
) -> list[Expectation]:
    """Apply the model to a step.

    Args:
        costs: As measured.
        shape: Of the step.
        step_ms: Its time with the switches as they are, in milliseconds.
        has_cache: Whether the packed-metadata cache is on.
        has_double_buffer: Whether reloads are double-buffered.
        has_one_pass: Whether grouping is one-pass.

    Returns:
        One expectation per switch.
    """
    layers, batches = shape.num_layers, shape.num_micro_batches
    return [
        _expect("--use-packed-cache", has_cache, step_ms, *_of_cache(costs.build_ms, shape)),
        _expect(
            "--double-buffer-ckpt",
            has_double_buffer,
            step_ms,
            *_of_double_buffer(costs.copy_ms, costs.compute_ms, layers, batches),
        ),
        _expect("--moe-grouping one-pass", has_one_pass, step_ms, *_of_grouping(costs, shape)),
    ]


def _of_cache(build_ms: float | None, shape: StepShape) -> tuple[float | None, str]:
    if build_ms is None:
        return None, "not measured"
    layers, batches = shape.num_layers, shape.num_micro_batches
    spared = layers - 1 + (layers if shape.is_recomputed else 0)
    recomputed = f" + {layers} recomputed" if shape.is_recomputed else ""
    return batches * spared * build_ms, f"{batches} micro-batches x ({layers} - 1{recomputed}) x s = {build_ms:.4f} ms"


def _of_double_buffer(
    copy_ms: float | None, compute_ms: float | None, layers: int, batches: int
) -> tuple[float | None, str]:
    if copy_ms is None or compute_ms is None:
        return None, "nothing was offloaded, so there is no copy to hide"
    formula = f"{batches} micro-batches x ({layers} - 1) x min(c = {copy_ms:.3f} ms, g = {compute_ms:.3f} ms)"
    return batches * (layers - 1) * min(copy_ms, compute_ms), formula


def _of_grouping(costs: LayerCosts, shape: StepShape) -> tuple[float | None, str]:
    if not shape.num_moe_layers:
        return None, "the model has no experts"
    if costs.loop_ms is None or costs.one_pass_ms is None:
        return None, "not measured: experts are spread over ranks"
    layers, batches = shape.num_moe_layers, shape.num_micro_batches
    formula = (
        f"{batches} micro-batches x {layers} MoE layers x "
        f"(loop {costs.loop_ms:.2f} ms - one pass {costs.one_pass_ms:.2f} ms)"
    )
    return batches * layers * (costs.loop_ms - costs.one_pass_ms), formula


def _expect(switch: str, is_on: bool, step_ms: float, gain_ms: float | None, formula: str) -> Expectation:
    if gain_ms is None:
        return Expectation(switch, is_on, None, formula, None)
    with_ms = step_ms if is_on else step_ms - gain_ms
    without_ms = with_ms + gain_ms
    return Expectation(switch, is_on, gain_ms, formula, without_ms / with_ms if with_ms > 0 else None)
