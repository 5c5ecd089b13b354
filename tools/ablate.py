#!/usr/bin/env python3
"""Measure each of the three optimisations alone and all together, and prove that they change no loss.

Five variants of one model take the same steps on the same data from the same seed: none, the packed cache alone, the
double buffer alone, one-pass grouping alone, all three. They take turns step by step, in rotating order, so that a
slow moment of the machine falls on all of them. What "off" means: metadata derived in every layer (and in its
recompute) from the batch's device tensors; the same offload with one buffer, copy then compute; one mask per expert.

Exit code 1 if losses or gradient norms differ, or if a counter is not what it must be. The cache and the double buffer
must be equal bit for bit over the whole run. One-pass grouping changes the order of sums, and two runs that differ in
the last bit drift apart as soon as one token chooses another expert; so the variants with it take over the baseline's
weights and moments before every round, and each round is one comparison from equal weights: losses within 1e-6
relative and gradient norms within 1e-5 in fp32 (1e-2 in bf16). On a GPU, where the baseline's own sums have no fixed
order, that tolerance holds for all variants. The times are measured, not judged.

All flags of pretrain_moe.py are accepted too (--config, --num-layers, ...). Builds, reads and waits are totals over all
rounds, those before the measured ones included.

    python tools/ablate.py
    python tools/ablate.py --config examples/glue_bound.yaml --steps 6 --json ablation.json
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_glue.config.environment import RankEnvironment, read_environment
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import resolve_config
from megatron_glue.config.sections import RunConfig
from megatron_glue.config.validation import validate
from megatron_glue.parallel.flat_range import FlatRange
from megatron_glue.parallel.launch import choose_device, distributed_session
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.metrics import StepTimer
from megatron_glue.training.presets import MOE_DEFAULTS
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.step import train_step
from megatron_glue.training.summary import write_json

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
    """

    variant: Variant
    session: Session
    times_s: list[float] = field(default_factory=list)

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
        exact = num_batches * config.model.num_layers * (2 if config.recompute else 1)
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


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Split this tool's own flags from those of the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=10, help="measured rounds (default 10)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before them (default 2)")
    parser.add_argument("--json", metavar="F", help="write all figures there")
    arguments, rest = parser.parse_known_args()
    for name, least in (("steps", 1), ("warmup", 0)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name}", getattr(arguments, name), "too few rounds", f"use at least {least}")
    return arguments, rest


def measure(measurements: list[Measurement], warmup: int, steps: int) -> None:
    """Let all variants take turns; the order rotates from round to round."""
    console = Console(stderr=True)
    for round_index in range(warmup + steps):
        for measurement in measurements:
            if measurement.variant.one_pass:
                take_over(measurement.session, measurements[0].session)
        shift = round_index % len(measurements)
        for measurement in measurements[shift:] + measurements[:shift]:
            session = measurement.session
            timer = StepTimer(session.device)
            timer.start()
            result = train_step(session)
            seconds = timer.stop(wait_for_device=True)
            session.metrics.add(result, seconds)
            if round_index >= warmup:
                measurement.times_s.append(seconds)
        console.print(f"round {round_index + 1}/{warmup + steps} done", highlight=False)
    for measurement in measurements:
        session = measurement.session
        session.metrics.flush(session.host_reader, session.mesh.world_group)


def check(measurements: list[Measurement]) -> list[str]:
    """Everything that is not as it must be, a line each."""
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


def report(measurements: list[Measurement]) -> list[dict[str, Any]]:
    """One row of figures per variant."""
    baseline, rows = measurements[0], []
    for measurement in measurements:
        session = measurement.session
        stats = session.built.activation.stats()
        low, high = measurement.spread_to(baseline)
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


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    """Show the figures that people compare."""
    table = Table(title=title, title_justify="left")
    table.add_column("variant", no_wrap=True)
    for column in (
        "step ms",
        "ratio",
        "min-max",
        "loss",
        "loss diff",
        "norm diff",
        "builds",
        "reads",
        "wait ms",
        "overlap",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["variant"],
            f"{row['median_step_ms']:.1f}",
            f"{row['ratio']:.2f}x",
            f"{row['ratio_min']:.2f}-{row['ratio_max']:.2f}",
            f"{row['last_loss']:.5f}",
            f"{row['loss_difference']:.1e}",
            f"{row['grad_norm_difference']:.1e}",
            str(row["metadata_builds"]),
            str(row["host_reads"]),
            f"{row['reload_wait_ms']:.1f}",
            f"{row['overlap_efficiency']:.0%}",
        )
    Console(width=124).print(table)


def run() -> int:
    """Measure, show, write, judge."""
    arguments, rest = parse_arguments()
    environ = read_environment()
    environment = RankEnvironment.from_mapping(environ)
    config = resolve_config(rest, environ, MOE_DEFAULTS, "tools/ablate.py").config
    config = config.model_copy(
        update={"training": config.training.model_copy(update={"train_iters": arguments.warmup + arguments.steps})}
    )
    for variant in VARIANTS:
        validate(variant.configure(config), environment.world_size)
    device = choose_device(config.training.device, environment)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    with distributed_session(environment, timeout, device), tempfile.TemporaryDirectory() as folder:
        mesh = ParallelMesh.build(config.parallel, device.type)
        measurements = [
            Measurement(variant, build_session(variant.configure(config), mesh, device, Path(folder) / str(index)))
            for index, variant in enumerate(VARIANTS)
        ]
        start = time.perf_counter()
        measure(measurements, arguments.warmup, arguments.steps)
        seconds = time.perf_counter() - start
        rows, complaints = report(measurements), check(measurements)
        for measurement in measurements:
            measurement.session.close()
        if environment.is_main:
            model, moe = config.model, config.moe
            title = (
                f"{model.num_layers} layers, hidden {model.hidden_size}, {moe.num_experts} experts top-"
                f"{moe.moe_router_topk}, {arguments.steps} rounds on {device}, {seconds:.0f} s"
            )
            print_table(rows, title)
            for complaint in complaints:
                print(f"FAILED {complaint}")
            if not complaints:
                print("losses and gradient norms agree; counters are as they must be")
            if arguments.json:
                write_json(arguments.json, {"title": title, "variants": rows, "complaints": complaints})
    return 1 if complaints else 0


def main() -> int:
    """Entry point with one-line errors."""
    try:
        return run()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
