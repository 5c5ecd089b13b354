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
order, all variants are compared so. The times are measured, not judged.

With --report, DIR holds report.md, report.png and report.json: times with their spread, tokens/s, samples/s per rank,
cost, utilisation, memory, counters, training and held-out losses and their differences, and, with --layer-sweep, the
gain against depth.

With --gate instead, one run of the configuration as given is held against a baseline that --save-baseline wrote before
an upgrade: losses, gradient norms, held-out loss, sampled layer outputs, throughput, peak memory. Exit code 1 if a
figure is beyond its threshold. Compare on the same machine, or loosen the thresholds of throughput and memory. It also
takes the record.json of an archive; tools/baseline.py keeps those, by version, and compares two without a run.

All flags of pretrain_moe.py are accepted too (--config, --num-layers, ...). Builds, reads and waits are totals over all
rounds, those before the measured ones included.

    python tools/ablate.py
    python tools/ablate.py --config examples/glue_bound.yaml --steps 6 --report report --layer-sweep 2,4,8
    python tools/ablate.py --config my.yaml --save-baseline before.json
    python tools/ablate.py --config my.yaml --gate before.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megatron_glue.config.environment import RankEnvironment, read_environment
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import resolve_config
from megatron_glue.config.sections import RunConfig
from megatron_glue.config.validation import validate
from megatron_glue.parallel.launch import choose_device, distributed_session
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.proofs.ablation import VARIANTS, Course, Measurement, check, measure, rows_of
from megatron_glue.proofs.ablation_report import draw, to_markdown
from megatron_glue.proofs.baseline_comparison import gate_table
from megatron_glue.proofs.baselines import read_observation
from megatron_glue.proofs.gate import GATED, Thresholds, check_same_run, default_of, given_limits, judge
from megatron_glue.proofs.gate_run import compared_settings, described_run, observe_run
from megatron_glue.proofs.pictures import load_pyplot
from megatron_glue.training.exit_codes import exit_code_of
from megatron_glue.training.presets import MOE_DEFAULTS
from megatron_glue.training.session import build_session
from megatron_glue.training.summary import check_writable_file, write_json

NUM_EVALUATIONS = 4


@dataclass(frozen=True)
class Place:
    """Where everything runs.

    Attributes:
        mesh: Ranks.
        device: Of this rank.
        folder: Room for offloaded activations.
    """

    mesh: ParallelMesh
    device: torch.device
    folder: Path


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Split this tool's own flags from those of the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=10, help="measured rounds (default 10)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before them (default 2)")
    parser.add_argument("--json", metavar="F", help="write all figures there")
    parser.add_argument("--report", metavar="DIR", help="write report.md, report.png and report.json there")
    parser.add_argument("--layer-sweep", metavar="N,N", help="measure these numbers of layers too, e.g. 2,4,8")
    parser.add_argument("--gpu-hour-price", type=float, metavar="X", help="price of one rank's hour, for the report")
    parser.add_argument("--save-baseline", metavar="F", help="write a baseline for --gate; measures no variants")
    parser.add_argument("--gate", metavar="F", help="compare with that baseline; exit code 1 on a regression")
    for name, meaning in GATED.items():
        parser.add_argument(f"--gate-{name}", type=float, metavar="X", help=f"{meaning} ({default_of(name)})")
    arguments, rest = parser.parse_known_args()
    for name, least in (("steps", 1), ("warmup", 0)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name}", getattr(arguments, name), "too few rounds", f"use at least {least}")
    price = arguments.gpu_hour_price
    if price is not None and not price >= 0:
        raise ConfigError("--gpu-hour-price", price, "is not a number from 0 on", "give 0 or more")
    arguments.limits = given_limits(arguments)
    if arguments.gate and arguments.save_baseline:
        raise ConfigError("--gate", arguments.gate, "stands beside --save-baseline", "give one of the two")
    arguments.depths = _parse_depths(arguments.layer_sweep)
    return arguments, rest


def _parse_depths(text: str | None) -> list[int]:
    try:
        depths = [int(word) for word in text.split(",")] if text else []
    except ValueError as error:
        raise ConfigError("--layer-sweep", text, "is no list of numbers", "give layers like 2,4,8") from error
    if any(depth < 1 for depth in depths):
        raise ConfigError("--layer-sweep", text, "has a model without layers", "give layers like 2,4,8")
    return depths


def with_layers(config: RunConfig, num_layers: int) -> RunConfig:
    """The same model with another depth."""
    return config.model_copy(update={"model": config.model.model_copy(update={"num_layers": num_layers})})


def run_variants(config: RunConfig, course: Course, place: Place) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure all variants of one model.

    Returns:
        Their rows, and what is not as it must be.
    """
    measurements: list[Measurement] = []
    try:
        for index, variant in enumerate(VARIANTS):
            session = build_session(
                variant.configure(config), place.mesh, place.device, place.folder / f"{config.model.num_layers}.{index}"
            )
            measurements.append(Measurement(variant, session))
        console = Console(stderr=True)
        measure(measurements, course, lambda line: console.print(line, highlight=False))
        return rows_of(measurements), check(measurements)
    finally:
        for measurement in measurements:
            measurement.session.close()


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


def ablate(config: RunConfig, arguments: argparse.Namespace, place: Place, *, is_main: bool) -> int:
    """Measure variants, show, write, judge."""
    pyplot = load_pyplot("--report", arguments.report) if arguments.report else None
    num_rounds = arguments.warmup + arguments.steps
    course = Course(arguments.warmup, arguments.steps, max(1, num_rounds // NUM_EVALUATIONS) if arguments.report else 0)
    start = time.perf_counter()
    rows, complaints = run_variants(config, course, place)
    model, moe = config.model, config.moe
    title = (
        f"{model.num_layers} layers, hidden {model.hidden_size}, {moe.num_experts} experts top-"
        f"{moe.moe_router_topk}, {arguments.steps} rounds on {place.device}, {time.perf_counter() - start:.0f} s"
    )
    depths: dict[str, list[dict[str, Any]]] = {}
    for depth in arguments.depths:
        sweep = Course(arguments.warmup, arguments.steps)
        depths[str(depth)], more = run_variants(with_layers(config, depth), sweep, place)
        complaints += [f"{depth} layers: {line}" for line in more]
    content = {"title": title, "variants": rows, "complaints": complaints}
    if depths:
        content["depths"] = depths
    if is_main:
        print_table(rows, title)
        for complaint in complaints:
            print(f"FAILED {complaint}")
        if not complaints:
            print("losses and gradient norms agree; counters are as they must be")
        if arguments.json:
            write_json(arguments.json, content)
        if arguments.report:
            folder = Path(arguments.report)
            write_json(folder / "report.json", content)
            (folder / "report.md").write_text(to_markdown(content, arguments.gpu_hour_price))
            draw(pyplot, content, folder / "report.png")
    return 1 if complaints else 0


def gate(config: RunConfig, arguments: argparse.Namespace, place: Place, *, is_main: bool) -> int:
    """Run the configuration as it is, and save it as a baseline or hold it against one."""
    baseline = read_observation(Path(arguments.gate), "--gate") if arguments.gate else None
    session = build_session(config, place.mesh, place.device, place.folder / "gate")
    try:
        if baseline is not None:
            now = described_run(session, arguments.warmup + arguments.steps)
            check_same_run(now, baseline["run"], compared_settings(RunConfig()), "--gate")
        observed = observe_run(session, arguments.warmup, arguments.steps)
    finally:
        session.close()
    if not is_main:
        return 0
    if arguments.json:
        write_json(arguments.json, observed)
    if baseline is None:
        write_json(arguments.save_baseline, observed)
        print(f"wrote {arguments.save_baseline}")
        return 0
    figures = judge(observed, baseline, Thresholds.of(baseline).with_given(arguments.limits))
    Console(width=124).print(gate_table(figures, f"against {arguments.gate}, made with {baseline.get('made_with')}"))
    num_failed = sum(figure.is_failed for figure in figures)
    print(f"{num_failed} of {len(figures)} figures failed" if num_failed else "no regression")
    return 1 if num_failed else 0


def run() -> int:
    """Resolve the configuration and do what was asked for."""
    arguments, rest = parse_arguments()
    environ = read_environment()
    environment = RankEnvironment.from_mapping(environ)
    config = resolve_config(rest, environ, MOE_DEFAULTS, "tools/ablate.py").config
    config = config.model_copy(
        update={"training": config.training.model_copy(update={"train_iters": arguments.warmup + arguments.steps})}
    )
    is_gate = bool(arguments.gate or arguments.save_baseline)
    for each in (config, *(with_layers(config, depth) for depth in arguments.depths)):
        for variant in VARIANTS:
            validate(each if is_gate else variant.configure(each), environment.world_size)
    for path, flag in ((arguments.json, "--json"), (arguments.save_baseline, "--save-baseline")):
        if path:
            check_writable_file(path, flag)
    if arguments.report:
        check_writable_file(Path(arguments.report) / "report.json", "--report")
    device = choose_device(config.training.device, environment)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    with distributed_session(environment, timeout, device), tempfile.TemporaryDirectory() as folder:
        mesh = ParallelMesh.build(config.parallel, device.type, config.model.num_kv_heads)
        work = gate if is_gate else ablate
        return work(config, arguments, Place(mesh, device, Path(folder)), is_main=environment.is_main)


def main() -> int:
    """Entry point with one-line errors."""
    return exit_code_of(run)


if __name__ == "__main__":
    raise SystemExit(main())
