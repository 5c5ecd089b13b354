#!/usr/bin/env python3
"""Profile a few training steps and say what bounds them, and which of the three optimisations should help by how much.

Runs warm-up steps, times some steps, records some under torch.profiler, and measures what one layer pays for metadata,
copies and grouping. Then it tells:

- where the time goes: compute, glue, copies, communication, input, optimizer (definitions in docs/profiling.md), and so
  the verdict;
- the three signals: the share of gaps between large operators, waits of the host for device values, copies that
  compute does not hide;
- what each switch saves by the model of docs/profiling.md, and Amdahl's ceiling for all of them.

All flags of pretrain_moe.py are accepted too (--config, --num-layers, --num-experts 0 for a dense model, ...). On
several ranks, under torchrun, the first rank's step is shown. With --out, DIR holds profile.md, profile.png,
profile.json and trace.json.gz (open it in https://ui.perfetto.dev or chrome://tracing). With --against a second run
follows with those flags added, in DIR/after, and both are compared in DIR/comparison.md and .png; --compare does that
with two saved profile.json.

    python tools/profile_step.py --config examples/glue_bound.yaml --out profile
    python tools/profile_step.py --activation-offload --moe-grouping loop \\
        --against="--use-packed-cache --double-buffer-ckpt --moe-grouping one-pass" --out profile
    python tools/profile_step.py --compare monday/profile.json today/profile.json --out comparison
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_glue.config.environment import RankEnvironment, read_environment
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import resolve_config
from megatron_glue.config.sections import RunConfig
from megatron_glue.config.validation import validate
from megatron_glue.parallel.launch import choose_device, distributed_session
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.proofs.pictures import load_pyplot
from megatron_glue.proofs.profile_events import LARGE_US, STEP_RANGE, phase_times_ms, spans_of
from megatron_glue.proofs.profile_report import comparison_markdown, draw, to_markdown
from megatron_glue.proofs.step_profile import analyse, explain
from megatron_glue.proofs.switch_costs import measure_costs, shape_of
from megatron_glue.proofs.switch_model import expectations
from megatron_glue.training.exit_codes import exit_code_of
from megatron_glue.training.metrics import StepTimer
from megatron_glue.training.presets import MOE_DEFAULTS
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.step import train_settled_step
from megatron_glue.training.summary import check_writable_file, write_json

Result = dict[str, Any]


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Split this tool's own flags from those of the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=3, help="profiled steps, and as many timed ones (default 3)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (default 2)")
    parser.add_argument("--large-us", type=float, metavar="US", help="see docs/profiling.md (default 100 CPU, 20 GPU)")
    parser.add_argument("--out", metavar="DIR", help="write report, picture, trace and figures there")
    parser.add_argument("--json", metavar="F", help="write the figures there")
    parser.add_argument("--against", metavar="FLAGS", help="profile again with these flags added, and compare")
    parser.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="compare two saved profile.json")
    arguments, rest = parser.parse_known_args()
    for name, least in (("steps", 1), ("warmup", 1)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name}", getattr(arguments, name), "too few steps", f"use at least {least}")
    if arguments.large_us is not None and arguments.large_us < 0:
        raise ConfigError("--large-us", arguments.large_us, "is negative", "give microseconds, 0 or more")
    if arguments.compare and (rest or arguments.against):
        unused = rest[0] if rest else "--against"
        raise ConfigError("--compare", " ".join(arguments.compare), f"runs nothing, so {unused} is unused", "drop one")
    return arguments, rest


def profile_run(flags: Sequence[str], arguments: argparse.Namespace, folder: Path | None) -> Result | None:
    """Profile one configuration.

    Args:
        flags: Of the run.
        arguments: This tool's own.
        folder: Where the trace goes; ``None``: nowhere.

    Returns:
        The figures, on the first rank only.

    Raises:
        ConfigError: If it cannot run.
    """
    environ = read_environment()
    environment = RankEnvironment.from_mapping(environ)
    config = resolve_config(flags, environ, MOE_DEFAULTS, "tools/profile_step.py").config
    num_steps = arguments.warmup + 2 * arguments.steps + 1
    config = config.model_copy(
        update={
            "logging": config.logging.model_copy(update={"nvtx_ranges": True}),
            "training": config.training.model_copy(update={"train_iters": num_steps}),
        }
    )
    device = choose_device(config.training.device, environment)
    validate(config, environment.world_size, device.type)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    with distributed_session(environment, timeout, device), tempfile.TemporaryDirectory() as offload_dir:
        mesh = ParallelMesh.build(config.parallel, device.type, config.model.num_kv_heads)
        session = build_session(config, mesh, device, Path(offload_dir))
        try:
            result = _observe(session, arguments, folder if environment.is_main else None)
        finally:
            session.close()
    return result if environment.is_main else None


def _observe(session: Session, arguments: argparse.Namespace, folder: Path | None) -> Result:
    """Warm up, time, record, measure."""
    for _ in range(arguments.warmup):
        train_settled_step(session)
    managers = session.built.activation.managers
    for manager in managers:
        manager.reset_stats()
    reads_before = session.num_step_host_reads
    step_ms = statistics.median(_timed_steps(session, arguments.steps))
    # Without the profiler, which slows the host but not the copies.
    copies, reads = session.built.activation.stats(), session.num_step_host_reads - reads_before
    (batch, *_) = session.data.loader.next_step()
    costs = measure_costs(session, batch)
    activities = [ProfilerActivity.CPU]
    if session.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        _timed_steps(session, arguments.steps)
    events = profiler.events()
    assert events is not None, "a profiler that has ended has its events"
    is_cpu = session.device.type == "cpu"
    large_us = LARGE_US[session.device.type] if arguments.large_us is None else arguments.large_us
    # The disk tier's copies are no operators: its waits are known from its own clock.
    waited_us = 1e3 * copies.reload_wait_ms if is_cpu else 0.0
    found = analyse(spans_of(events, session.device.type), large_us, waited_us)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    switches = session.config.accelerator
    expected = expectations(
        costs,
        shape_of(session),
        step_ms,
        has_cache=switches.enable_metadata_cache,
        has_double_buffer=switches.enable_double_buffer,
        has_one_pass=switches.enable_grouped_index,
    )
    return {
        "title": _title(session.config, session),
        "switches": _switches(session.config),
        "explanation": explain(found),
        "step_ms": step_ms,
        "num_timed_steps": arguments.steps,
        "num_profiled_steps": arguments.steps,
        "large_us": large_us,
        "profile": found.as_json(),
        "phases_ms": phase_times_ms(events, arguments.steps),
        # On a GPU a read shows as a synchronisation of its stream already.
        "host_reads_per_step": reads / arguments.steps if is_cpu else 0.0,
        "copy_ms": copies.copy_ms / arguments.steps if is_cpu else found.copy_us / 1e3,
        "expectations": [each.as_json() for each in expected],
    }


def _timed_steps(session: Session, num_steps: int) -> list[float]:
    """Milliseconds of each step, ended on the device."""
    timer, times = StepTimer(session.device), []
    for _ in range(num_steps):
        timer.start()
        with record_function(STEP_RANGE):
            result = train_settled_step(session)
            seconds = timer.stop(wait_for_device=True)
        session.metrics.add(result, seconds)
        times.append(1e3 * seconds)
    return times


def _title(config: RunConfig, session: Session) -> str:
    model, moe = config.model, config.moe
    experts = f", {moe.num_experts} experts top-{moe.moe_router_topk}" if moe.num_experts else ", dense"
    batches = session.data.loader.num_micro_batches
    return (
        f"{model.num_layers} layers, hidden {model.hidden_size}{experts}, {batches} micro-batches of "
        f"{config.training.micro_batch_size} x {config.data.seq_length} tokens on {session.device}, "
        f"{session.mesh.world_size} rank(s), {torch.get_num_threads()} threads"
    )


def _switches(config: RunConfig) -> str:
    switches = config.accelerator
    names = (
        ("cache", switches.enable_metadata_cache),
        ("double buffer", switches.enable_double_buffer),
        ("one-pass grouping", switches.enable_grouped_index),
    )
    return ", ".join(f"{name} {'on' if is_on else 'off'}" for name, is_on in names)


def read_result(path: str) -> Result:
    """Read a saved profile.

    Args:
        path: A ``profile.json``.

    Raises:
        ConfigError: If it is none.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("--compare", path, f"cannot be read ({error})", "give a profile.json") from error
    if not isinstance(content, dict) or not {"profile", "step_ms", "expectations"} <= set(content):
        raise ConfigError("--compare", path, "is no result of this tool", "give a profile.json from its --out")
    return content


def publish(result: Result, folder: Path | None, pyplot: Any) -> None:
    """Show one result and write its files."""
    text = to_markdown(result)
    Console(width=120).print(Markdown(text))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "profile.md").write_text(text)
        write_json(folder / "profile.json", result)
        draw(pyplot, {"step": result}, folder / "profile.png")


def publish_comparison(before: Result, after: Result, folder: Path | None, pyplot: Any) -> None:
    """Show two results beside each other and write the files of the comparison."""
    text = comparison_markdown(before, after)
    Console(width=120).print(Markdown(text))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "comparison.md").write_text(text)
        draw(pyplot, {"before": before, "after": after}, folder / "comparison.png")


def run() -> int:
    """Profile or read, show, write."""
    arguments, rest = parse_arguments()
    folder = Path(arguments.out) if arguments.out else None
    pyplot = load_pyplot("--out", arguments.out) if folder else None
    if folder is not None:
        check_writable_file(folder / "profile.json", "--out")
    if arguments.json:
        check_writable_file(arguments.json, "--json")
    if arguments.compare:
        before, after = (read_result(path) for path in arguments.compare)
        publish_comparison(before, after, folder, pyplot)
        if arguments.json:
            write_json(arguments.json, {"before": before, "after": after})
        return 0
    first = profile_run(rest, arguments, folder)
    if first is not None:
        publish(first, folder, pyplot)
    content = first
    if arguments.against is not None:
        second_folder = folder / "after" if folder else None
        second = profile_run([*rest, *shlex.split(arguments.against)], arguments, second_folder)
        if first is None or second is None:
            return 0
        publish(second, second_folder, pyplot)
        publish_comparison(first, second, folder, pyplot)
        content = {"before": first, "after": second}
    if arguments.json and content is not None:
        write_json(arguments.json, content)
    return 0


def main() -> int:
    """Entry point with one-line errors."""
    return exit_code_of(run)


if __name__ == "__main__":
    raise SystemExit(main())
