"""Variants of one model that differ in the three optimisations, measured in turns and held against each other.

What ``tools/ablate.py`` runs: it builds a session per variant, lets them take turns, checks that losses, gradient norms
and counters are as they must be, and turns what was measured into plain rows. How rows are shown stands in
``ablation_report.py``.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_glue.config.sections import RunConfig
from megatron_glue.parallel.flat_range import FlatRange
from megatron_glue.training.evaluation import evaluate
from megatron_glue.training.metrics import StepTimer
from megatron_glue.training.session import Session
from megatron_glue.training.step import train_settled_step

LOSS_TOLERANCE, NORM_TOLERANCE, BF16_TOLERANCE = 1e-6, 1e-5, 1e-2


@dataclass(frozen=True)
class Variant:
    """Which of the three optimisations are on."""

    name: str
    cache: bool = False
    double_buffer: bool = False
    one_pass: bool = False

    def configure(self, config: RunConfig) -> RunConfig:
        """The same run with these switches; activations are offloaded in every variant."""
        switches = {
            "enable_metadata_cache": self.cache,
            "enable_double_buffer": self.double_buffer,
            "enable_grouped_index": self.one_pass,
        }
        accelerator = config.accelerator.model_copy(update=switches)
        return config.model_copy(
            update={
                "training": config.training.model_copy(update={"accelerator": accelerator}),
                "activation": config.activation.model_copy(update={"activation_offload": True}),
            }
        )


VARIANTS = (
    Variant("none"),
    Variant("packed cache", cache=True),
    Variant("double buffer", double_buffer=True),
    Variant("one-pass grouping", one_pass=True),
    Variant("all three", cache=True, double_buffer=True, one_pass=True),
)


@dataclass
class Measurement:
    """One variant's session and what it did.

    Attributes:
        variant: Its switches.
        session: Its model, on the same weights as all others.
        times_s: Wall time of each measured step.
        cpu_s: CPU time of this process in the same steps, all threads.
        step_tokens: Live tokens of each measured step, over all ranks.
        peak_bytes: Largest device memory above what was allocated before a step; ``None`` without an accelerator.
        utilisations: What the driver said behind each measured step, in per cent; empty without an accelerator.
        heldout: (rounds done, held-out loss), each time it was evaluated.
    """

    variant: Variant
    session: Session
    times_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    peak_bytes: int | None = None
    utilisations: list[int] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median step time."""
        return statistics.median(self.times_s)

    def ratio_to(self, baseline: Measurement) -> float:
        """Median over steps of baseline time / own time, each pair taken in the same round."""
        return statistics.median(base / own for base, own in zip(baseline.times_s, self.times_s, strict=True))

    def spread_to(self, baseline: Measurement) -> tuple[float, float]:
        """Smallest and largest ratio of a round."""
        ratios = [base / own for base, own in zip(baseline.times_s, self.times_s, strict=True)]
        return min(ratios), max(ratios)

    def differences(self, baseline: Measurement) -> tuple[float, float]:
        """Largest relative difference of a loss, and of a gradient norm, to the baseline's in the same round."""
        own, base = self.session.metrics, baseline.session.metrics
        return _largest(own.losses, base.losses), _largest(own.grad_norms, base.grad_norms)

    def tolerances(self) -> tuple[float, float]:
        """What :meth:`differences` may be at most."""
        session = self.session
        if session.built.precision.is_mixed:
            return BF16_TOLERANCE, BF16_TOLERANCE
        is_exact = not self.variant.one_pass and session.device.type == "cpu"
        return (0.0, 0.0) if is_exact else (LOSS_TOLERANCE, NORM_TOLERANCE)

    def expected_builds(self) -> tuple[int, int]:
        """Fewest and most metadata builds that this variant may have made.

        With the cache: one per micro-batch and kind of metadata (a kind per window, but windows that no document is
        longer than share one). Without: one per layer, and again in its recompute.
        """
        config, num_batches = self.session.config, self.session.num_micro_batches
        windows = {config.model.window_of_layer(layer) for layer in range(config.model.num_layers)}
        if self.variant.cache:
            return num_batches, num_batches * len(windows)
        num_layers, limit = config.model.num_layers, config.num_recomputed_blocks
        num_recomputed = num_layers if limit is None else min(limit, num_layers)
        exact = num_batches * (num_layers + (num_recomputed if config.recompute else 0))
        return exact, exact


def _largest(own: list[float], base: list[float]) -> float:
    differences = [abs(a - b) / abs(b) if b else abs(a) for a, b in zip(own, base, strict=True)]
    # max() would step over a NaN.
    return max(difference if math.isfinite(difference) else math.inf for difference in differences)


@torch.no_grad()
def take_over(session: Session, baseline: Session) -> None:
    """Copy weights, buffers and optimizer state, so that the next step starts where the baseline's does."""
    own, base = session.engine.module.state_dict(), baseline.engine.module.state_dict()
    for name, tensor in own.items():
        tensor.copy_(base[name])
    for (_, _, moments), (_, _, source) in zip(
        session.optimizer.named_state(), baseline.optimizer.named_state(), strict=True
    ):
        for key, tensor in moments.items():
            _values(tensor).copy_(_values(source[key]))


def _values(moment: Tensor | FlatRange) -> Tensor:
    """Where a moment's numbers are: ZeRO keeps a range of them."""
    return moment.values if isinstance(moment, FlatRange) else moment


@dataclass(frozen=True)
class Course:
    """How long variants take turns.

    Attributes:
        warmup: Rounds before the measured ones.
        steps: Measured rounds.
        eval_every: Rounds between evaluations on the held-out documents; 0 for none.
    """

    warmup: int
    steps: int
    eval_every: int = 0

    def is_evaluated(self, num_rounds: int) -> bool:
        """Whether the held-out loss is taken after this many rounds."""
        return self.eval_every > 0 and (num_rounds % self.eval_every == 0 or num_rounds == self.warmup + self.steps)


def measure(measurements: list[Measurement], course: Course, say: Callable[[str], None]) -> None:
    """Let all variants take turns; the order rotates from round to round.

    Args:
        measurements: Of all variants, the baseline first.
        course: How long.
        say: Told about progress.
    """
    num_rounds = course.warmup + course.steps
    for round_index in range(num_rounds):
        for measurement in measurements[1:]:
            # A GPU's kernels sum in no fixed order, so there no two runs stay together.
            if measurement.variant.one_pass or measurement.session.device.type != "cpu":
                take_over(measurement.session, measurements[0].session)
        shift = round_index % len(measurements)
        for measurement in measurements[shift:] + measurements[:shift]:
            _step(measurement, is_measured=round_index >= course.warmup)
        if course.is_evaluated(round_index + 1):
            for measurement in measurements:
                measurement.heldout.append((round_index + 1, heldout_loss(measurement.session)))
        say(f"round {round_index + 1}/{num_rounds} done")
    for measurement in measurements:
        session = measurement.session
        session.metrics.flush(session.host_reader, session.mesh.world_group)


def heldout_loss(session: Session) -> float:
    """Loss on the held-out documents, nats per token, with the weights as they are; no counter moves."""
    with session.uncounted():
        batches = session.data.eval_batches(session.device)
        seed = session.config.training.seed
        loss = evaluate(session.built.model, session.executor, batches, session.mesh, seed=seed)
        return session.host_reader.read(loss)


def _step(measurement: Measurement, *, is_measured: bool) -> None:
    session, device = measurement.session, measurement.session.device
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    allocated_bytes = torch.cuda.memory_allocated(device) if is_cuda else 0
    timer, cpu_start = StepTimer(device), time.process_time()
    timer.start()
    result = train_settled_step(session)
    seconds = timer.stop(wait_for_device=True)
    session.metrics.add(result, seconds)
    if not is_measured:
        return
    measurement.times_s.append(seconds)
    measurement.cpu_s.append(time.process_time() - cpu_start)
    measurement.step_tokens.append(result.num_tokens)
    if is_cuda:
        above = torch.cuda.max_memory_allocated(device) - allocated_bytes
        measurement.peak_bytes = max(measurement.peak_bytes or 0, above)
        utilisation = _device_utilisation(device)
        if utilisation is not None:
            measurement.utilisations.append(utilisation)


def _device_utilisation(device: torch.device) -> int | None:
    """Per cent of the driver's last sample in which a kernel ran; ``None`` without the driver's Python library."""
    try:
        return torch.cuda.utilization(device)
    except (ImportError, RuntimeError):
        return None


def utilisation_of(measurement: Measurement) -> tuple[float | None, str]:
    """Share of the device that a variant's steps used, and what that share is of, or why it is not known."""
    if measurement.session.device.type == "cuda":
        if not measurement.utilisations:
            return None, "not available: pip install nvidia-ml-py"
        return statistics.mean(measurement.utilisations) / 100, "time with a kernel running, by the driver"
    num_cores = len(os.sched_getaffinity(0))
    share = sum(measurement.cpu_s) / (sum(measurement.times_s) * num_cores)
    return share, f"CPU time of the process / wall time / {num_cores} cores"


def check(measurements: list[Measurement]) -> list[str]:
    """Everything that is not as it must be, a line each.

    Args:
        measurements: After :func:`measure`, the baseline first.
    """
    baseline, complaints = measurements[0], []
    for measurement in measurements:
        variant, cache = measurement.variant, measurement.session.built.metadata_cache
        names = ("losses", "gradient norms")
        for name, difference, limit in zip(
            names, measurement.differences(baseline), measurement.tolerances(), strict=True
        ):
            if not difference <= limit:
                complaints.append(f"{variant.name}: {name} differ by {difference:.2e}, allowed {limit}")
        fewest, most = measurement.expected_builds()
        if not fewest <= cache.builds <= most:
            complaints.append(f"{variant.name}: {cache.builds} metadata builds, expected {fewest} to {most}")
        if variant.cache and variant.one_pass and measurement.session.mesh.ep_size == 1:
            reads = measurement.session.num_step_host_reads
            if reads:
                complaints.append(f"{variant.name}: {reads} device-to-host reads inside training steps, expected none")
    return complaints


def rows_of(measurements: list[Measurement]) -> list[dict[str, Any]]:
    """One row of plain figures per variant.

    Args:
        measurements: After :func:`measure`, the baseline first.
    """
    baseline, rows = measurements[0], []
    for measurement in measurements:
        session = measurement.session
        stats = session.built.activation.stats()
        low, high = measurement.spread_to(baseline)
        tokens = statistics.mean(measurement.step_tokens)
        utilisation, utilisation_note = utilisation_of(measurement)
        loss_difference, norm_difference = measurement.differences(baseline)
        rows.append(
            {
                "variant": measurement.variant.name,
                "median_step_ms": 1e3 * measurement.median_s,
                "ratio": measurement.ratio_to(baseline),
                "ratio_min": low,
                "ratio_max": high,
                "loss_difference": loss_difference,
                "grad_norm_difference": norm_difference,
                "last_loss": session.metrics.losses[-1],
                "losses": session.metrics.losses,
                "grad_norms": session.metrics.grad_norms,
                "step_times_s": measurement.times_s,
                "tokens_per_step": tokens,
                "tokens_per_second": tokens / measurement.median_s,
                "samples_per_second_per_rank": session.config.training.global_batch_size
                / session.mesh.world_size
                / measurement.median_s,
                "ranks": session.mesh.world_size,
                "peak_bytes_of_a_step": measurement.peak_bytes,
                "utilisation": utilisation,
                "utilisation_note": utilisation_note,
                "heldout": measurement.heldout,
                "micro_batches": session.num_micro_batches,
                "metadata_builds": session.built.metadata_cache.builds,
                "metadata_reuses": session.built.metadata_cache.reuses,
                "host_reads": session.num_step_host_reads,
                "offloaded_bytes": stats.offloaded_bytes,
                "reload_copy_ms": stats.copy_ms,
                "reload_wait_ms": stats.reload_wait_ms,
                "overlap_efficiency": stats.overlap_efficiency,
            }
        )
    return rows
