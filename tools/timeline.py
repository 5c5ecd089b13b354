#!/usr/bin/env python3
"""Draw the copies of offloaded activations under the compute that hides them, from real training steps.

Two sessions of one model take turns step by step: offload through one buffer (copy, then compute) and through two (the
next copy runs while a block computes). Each step's copies, waits and blocks are recorded. The last step becomes a
picture with a compute lane, a lane of copies back and a lane of copies away for each session; all steps become a Chrome
trace for chrome://tracing or https://ui.perfetto.dev. Beside it stand the step times, what the second buffer gains in
wall-clock time, and the overlap efficiency: hidden copy time / min(copy, compute).

A disk that is fast against this machine's compute leaves little to hide. On the disk tier --copy-share therefore slows
copies down until one takes that share of a block's backward, as measured in the first steps (its threads sleep); with
--copy-share 0, or --offload-max-mb-per-s, they run as they are.

Exit code 1 if the two sessions' losses differ (on a GPU, whose kernels have no fixed order of sums, by more than 1e-2
relative), or if two buffers hide less than --at-least. All flags of
pretrain_gpt.py are accepted too (--config, --num-layers, ...). The picture needs matplotlib: pip install -e '.[bench]'.

    python tools/timeline.py --output timeline.png --trace timeline.json
    python tools/timeline.py --copy-share 0.3 --at-least 0.9 --json
    python tools/timeline.py --config examples/glue_bound.yaml --steps 2 --num-layers 8
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_glue.activation.chrome_trace import LANES, chrome_trace
from megatron_glue.activation.statistics import ReloadTimes, TimelineEvent, sum_times
from megatron_glue.config.environment import RankEnvironment, read_environment
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import resolve_config
from megatron_glue.config.sections import DataConfig, ModelConfig, RunConfig, TrainConfig
from megatron_glue.config.validation import validate
from megatron_glue.parallel.launch import choose_device, distributed_session
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.metrics import StepTimer
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.step import train_settled_step
from megatron_glue.training.summary import write_json

DEFAULTS = RunConfig(
    model=ModelConfig(num_layers=12),
    data=DataConfig(seq_length=512),
    training=TrainConfig(name="timeline", global_batch_size=2),
)
"""Deep enough that a step shows many copies."""

VARIANTS = {"one buffer": False, "two buffers": True}
CALIBRATION_STEPS = 2
GPU_LOSS_TOLERANCE = 1e-2
"""Relative. Sums of attention's gradients have no fixed order there; on a CPU losses must be equal bit for bit."""

COLOURS = {"forward": "#9ecae1", "backward": "#3182bd", "wait": "#de2d26", "reload": "#31a354", "offload": "#fd8d3c"}


@dataclass
class Measurement:
    """One session and what its measured steps showed.

    Attributes:
        session: Closed by the caller.
        step_ms: Wall time of each step.
        times: Copy, wait and compute of each step.
        timeline: Events of all of them.
        chosen: What the activation manager does, in one line.
    """

    session: Session
    step_ms: list[float] = field(default_factory=list)
    times: list[ReloadTimes] = field(default_factory=list)
    timeline: list[TimelineEvent] = field(default_factory=list)
    chosen: str = ""

    def step(self) -> None:
        """Train one step and measure it."""
        timer = StepTimer(self.session.device)
        timer.start()
        result = train_settled_step(self.session)
        seconds = timer.stop(wait_for_device=True)
        self.session.metrics.add(result, seconds)
        self.step_ms.append(1e3 * seconds)

    def begin(self) -> None:
        """Warm-up is over."""
        self.step_ms.clear()
        self.session.built.activation.start_timeline()

    def finish(self) -> None:
        """Collect what was recorded."""
        activation = self.session.built.activation
        self.chosen = activation.describe()
        self.times = activation.step_times()
        self.timeline = [event for timeline in activation.timelines() for event in timeline]
        self.session.metrics.flush(self.session.host_reader, self.session.mesh.world_group)

    def figures(self) -> dict[str, Any]:
        """Medians and sums for people and programs."""
        times = sum_times(self.times)
        return {
            "median_step_ms": statistics.median(self.step_ms),
            "step_ms": self.step_ms,
            "copy_ms": [step.copy_ms for step in self.times],
            "compute_ms": [step.compute_ms for step in self.times],
            "reload_wait_ms": [step.reload_wait_ms for step in self.times],
            "overlap_efficiency": times.overlap_efficiency,
            "overlap_efficiency_per_step": [step.overlap_efficiency for step in self.times],
            "chosen": self.chosen,
        }


def configure(config: RunConfig, *, double_buffer: bool, max_mb_per_s: float | None = None) -> RunConfig:
    """The same run with offload through one buffer or two, and copies no faster than a rate."""
    accelerator = config.accelerator.model_copy(update={"enable_double_buffer": double_buffer})
    changes: dict[str, Any] = {"activation_offload": True}
    if max_mb_per_s is not None:
        changes["offload_max_mb_per_s"] = max_mb_per_s
    return config.model_copy(
        update={
            "training": config.training.model_copy(update={"accelerator": accelerator}),
            "activation": config.activation.model_copy(update=changes),
        }
    )


@dataclass(frozen=True)
class Place:
    """Where sessions are built."""

    mesh: ParallelMesh
    device: Any
    folder: Path

    def measurement(self, config: RunConfig, name: str) -> Measurement:
        """A new session with a folder of its own."""
        return Measurement(build_session(config, self.mesh, self.device, self.folder / name))


def rate_for_share(config: RunConfig, share: float, place: Place) -> float:
    """MiB per second at which a copy takes ``share`` of the backward of its block, measured in a few steps."""
    measurement = place.measurement(configure(config, double_buffer=True), "calibration")
    try:
        for index in range(CALIBRATION_STEPS):
            measurement.step()
            if index == 0:
                measurement.begin()
        stats = measurement.session.built.activation.stats()
    finally:
        measurement.session.close()
    if not stats.num_offloads:
        raise ConfigError("--copy-share", share, "no block input was offloaded", "use a model that trains its blocks")
    block_s = stats.compute_ms / (stats.num_reloads + stats.num_residents) / 1e3
    return stats.offloaded_bytes / stats.num_offloads / 2**20 / (share * block_s)


def measure(config: RunConfig, arguments: argparse.Namespace, place: Place) -> dict[str, Measurement]:
    """Let both variants take turns and collect what they recorded; their sessions are closed."""
    rate = None
    if arguments.copy_share and place.device.type == "cpu" and not config.activation.offload_max_mb_per_s:
        rate = rate_for_share(config, arguments.copy_share, place)
    measurements: dict[str, Measurement] = {}
    try:
        for name, double_buffer in VARIANTS.items():
            chosen = configure(config, double_buffer=double_buffer, max_mb_per_s=rate)
            measurements[name] = place.measurement(chosen, name)
        for index in range(arguments.warmup + arguments.steps):
            for measurement in measurements.values():
                if index == arguments.warmup:
                    measurement.begin()
                measurement.step()
        for measurement in measurements.values():
            measurement.finish()
    finally:
        for measurement in measurements.values():
            measurement.session.close()
    return measurements


def report(measurements: Mapping[str, Measurement]) -> dict[str, Any]:
    """All figures, and what the second buffer gains: medians over pairs of steps that stood side by side."""
    one, two = measurements["one buffer"], measurements["two buffers"]
    losses = zip(one.session.metrics.losses, two.session.metrics.losses, strict=True)
    differences = [abs(a - b) / abs(a) if a != b else 0.0 for a, b in losses]
    # max() would step over a NaN.
    difference = max(x if math.isfinite(x) else math.inf for x in differences)
    return {
        **{name: measurement.figures() for name, measurement in measurements.items()},
        "gain": statistics.median(a / b for a, b in zip(one.step_ms, two.step_ms, strict=True)),
        "same_losses": difference <= (0.0 if one.session.device.type == "cpu" else GPU_LOSS_TOLERANCE),
        "loss_difference": difference,
    }


def draw(measurements: Mapping[str, Measurement], title: str, output: str) -> None:
    """Draw the last step of each variant: lanes under each other, the number of the block in its bar."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot  # pyright: ignore[reportMissingImports]

    figure, panels = pyplot.subplots(
        len(measurements), 1, figsize=(14, 2.2 * len(measurements) + 0.8), sharex=True, layout="constrained"
    )
    for axes, (name, measurement) in zip(panels, measurements.items(), strict=True):
        draw_lanes(axes, last_step(measurement.timeline))
        efficiency = measurement.times[-1].overlap_efficiency
        axes.set_title(
            f"{name}: step {measurement.step_ms[-1]:.0f} ms, overlap efficiency {efficiency:.0%}", loc="left"
        )
    panels[-1].set_xlabel("ms since the first block of the step")
    handles = [patches.Patch(color=colour, label=label) for label, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(COLOURS), frameon=False)
    figure.suptitle(title)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


def draw_lanes(axes: Any, events: Sequence[TimelineEvent]) -> None:
    """Draw the events of one step into one panel."""
    origin = min(event.start_ms for event in events)
    for event in events:
        row, width = LANES.index(event.lane), event.end_ms - event.start_ms
        axes.barh(
            row,
            width,
            left=event.start_ms - origin,
            height=0.8,
            color=COLOURS[event.name],
            edgecolor="white",
            linewidth=0.4,
        )
        if event.name != "wait":
            axes.text(
                event.start_ms - origin + width / 2, row, str(event.call.block), ha="center", va="center", fontsize=6
            )
    axes.set_yticks(range(len(LANES)), ["compute", "copy back", "copy away"])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


def last_step(timeline: Sequence[TimelineEvent]) -> list[TimelineEvent]:
    """The events of the newest step."""
    newest = max(event.step for event in timeline)
    return [event for event in timeline if event.step == newest]


def print_table(figures: Mapping[str, Any], title: str) -> None:
    """One line per variant, then the gain."""
    print(title)
    print(f"{'variant':<12}{'step ms':>10}{'copy ms':>10}{'compute ms':>12}{'wait ms':>10}{'hidden':>9}   (per step)")
    for name in VARIANTS:
        row = figures[name]
        columns = [statistics.mean(row[key]) for key in ("copy_ms", "compute_ms", "reload_wait_ms")]
        print(
            f"{name:<12}{row['median_step_ms']:>10.0f}{columns[0]:>10.0f}{columns[1]:>12.0f}{columns[2]:>10.1f}"
            f"{row['overlap_efficiency']:>9.0%}"
        )
    difference = figures["loss_difference"]
    same = f"losses differ by {difference:.1e}" if difference else "the same losses bit for bit"
    same = same if figures["same_losses"] else f"OTHER LOSSES, by {difference:.1e}"
    print(f"two buffers: {figures['gain']:.2f}x the speed of one, {same}")
    print(figures["two buffers"]["chosen"])


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Split this tool's own flags from those of the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=3, help="recorded steps of each variant (default 3)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them (default 1)")
    parser.add_argument("--copy-share", type=float, default=0.3, help="see above; off: 0 (default 0.3)")
    parser.add_argument("--at-least", type=float, default=0.0, help="overlap efficiency of two buffers; off: 0")
    parser.add_argument("--output", metavar="F", help="picture of the last step; its ending chooses the format")
    parser.add_argument("--trace", metavar="F", help="Chrome trace of all recorded steps")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="F",
        help="write all figures there; without F print them, no table",
    )
    arguments, rest = parser.parse_known_args()
    for name, least in (("steps", 1), ("warmup", 0), ("copy_share", 0.0)):
        if getattr(arguments, name) < least:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(flag, getattr(arguments, name), "too small", f"use at least {least}")
    return arguments, rest


def run() -> int:
    """Measure, draw, show, judge."""
    arguments, rest = parse_arguments()
    environ = read_environment()
    environment = RankEnvironment.from_mapping(environ)
    config = resolve_config(rest, environ, DEFAULTS, "tools/timeline.py").config
    steps = CALIBRATION_STEPS + arguments.warmup + arguments.steps
    config = config.model_copy(update={"training": config.training.model_copy(update={"train_iters": steps})})
    for double_buffer in VARIANTS.values():
        validate(configure(config, double_buffer=double_buffer), environment.world_size)
    device = choose_device(config.training.device, environment)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    with distributed_session(environment, timeout, device), tempfile.TemporaryDirectory() as folder:
        place = Place(ParallelMesh.build(config.parallel, device.type), device, Path(folder))
        measurements = measure(config, arguments, place)
    figures = report(measurements)
    model = config.model
    title = f"{model.num_layers} layers, hidden {model.hidden_size}, {config.data.seq_length} tokens, {device}"
    if environment.is_main:
        content = {"title": title, **figures}
        if arguments.json == "-":
            print(json.dumps(content, indent=2))
        else:
            print_table(figures, title)
            if arguments.json:
                write_json(arguments.json, content)
        if arguments.trace:
            timelines = {name: measurement.timeline for name, measurement in measurements.items()}
            write_json(arguments.trace, chrome_trace(timelines))
        if arguments.output:
            draw(measurements, title, arguments.output)
    is_hidden = figures["two buffers"]["overlap_efficiency"] >= arguments.at_least
    if not is_hidden:
        print(f"FAILED two buffers hide less than --at-least {arguments.at_least}", file=sys.stderr)
    return 0 if figures["same_losses"] and is_hidden else 1


def main() -> int:
    """Entry point with one-line errors."""
    try:
        return run()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        if error.name != "matplotlib":
            raise
        print("error: matplotlib is not installed; run pip install -e '.[bench]'", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
