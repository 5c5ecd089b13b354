#!/usr/bin/env python3
"""Keep a baseline of a job for each version of the code, and refuse a version whose numbers drift.

    record   run a few steps of a job from its seed, evaluate, and archive what came out as ARCHIVE/VERSION-REVISION/
    compare  hold one record against another, or the code that is installed now against a record
    list     the records of an archive

A record holds record.json (losses, gradient norms, held-out loss, sampled layer outputs, throughput, memory),
losses.csv, environment.json (versions, kernels, switches with their reasons), packages.txt (a requirements file) and
config.yaml. One archive is for one job: its records are of the same settings. Words behind -- are the flags of the job,
those of the entry points; torchrun in front runs it on several ranks.

compare --against RECORD runs now, with as many steps as the record has: as its config.yaml says, or, with flags behind
--, as they say. Settings of model, data, optimizer and layout, seed, batch sizes, data and ranks must be those of the
record. Kernels and the three switches may differ; they may be what is on trial.

Losses, gradient norms, the held-out loss and layer outputs beyond their limits refuse always. Throughput and memory
refuse where both runs were made on the same kind of machine (device, processor, cores, threads); throughput may drop by
its limit or by the spread of step times, whichever is more. On another machine they are reported. --performance
overrides that.

Exit code 0: no drift, 1: drift, or the run failed, 2: nothing that can be compared, or a wrong flag.

    python tools/baseline.py record --archive baselines/moe -- --config examples/laptop_moe.yaml
    python tools/baseline.py compare --against baselines/moe/0.1.0-3f2a9c1d7e55
    python tools/baseline.py compare baselines/moe/0.1.0-3f2a9c1d7e55 baselines/moe/0.2.0-9b1e77aa0c4d
    python tools/baseline.py list baselines/moe
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from megatron_glue.config.environment import RankEnvironment, read_environment
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import ResolvedConfig, resolve_config
from megatron_glue.config.validation import validate
from megatron_glue.config.yaml_files import to_yaml
from megatron_glue.parallel.agreement import PeerFailedError, together
from megatron_glue.parallel.host_allocator import keep_freed_memory
from megatron_glue.parallel.launch import choose_device, distributed_session
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.proofs.baseline_comparison import (
    Comparison,
    check_comparable,
    compare,
    gate_table,
    records_table,
)
from megatron_glue.proofs.baselines import (
    CONFIG_NAME,
    Record,
    check_room,
    list_records,
    read_record,
    record_name,
    write_record,
)
from megatron_glue.proofs.gate import GATED, Thresholds, default_of, given_limits, spread_of
from megatron_glue.proofs.gate_run import described_run, first_not_finite, observe_run
from megatron_glue.proofs.packages import installed_packages
from megatron_glue.training.exit_codes import EXIT_FAILED, exit_code_of
from megatron_glue.training.presets import GPT_DEFAULTS, MOE_DEFAULTS
from megatron_glue.training.run_environment import software
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.start_record import describe_start
from megatron_glue.training.summary import check_writable_file, write_json

PRESETS = {"moe": MOE_DEFAULTS, "dense": GPT_DEFAULTS}
WIDTH = 124


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str] | None]:
    """Split the tool's own flags from those of the job.

    Returns:
        Its own, and the words behind ``--``; ``None`` without it.
    """
    own, job = list(argv), None
    if "--" in own:
        at = own.index("--")
        own, job = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="run, and archive what came out")
    record.add_argument("--archive", metavar="DIR", required=True, help="folder of this job's records")
    record.add_argument("--label", metavar="TEXT", default="", help="behind the record's name, e.g. torch-2.13")
    record.add_argument("--replace", action="store_true", help="a record of the same code gives way")
    record.add_argument("--steps", type=int, default=10, help="timed steps (default 10)")
    record.add_argument("--warmup", type=int, default=2, help="steps before them (default 2)")
    against = commands.add_parser("compare", help="hold a record, or the code as it is, against a record")
    against.add_argument("records", nargs="*", metavar="RECORD", help="two: the baseline, and what is judged")
    against.add_argument("--against", metavar="RECORD", help="the baseline; what is judged runs now")
    against.add_argument(
        "--performance", choices=("auto", "refuse", "report"), default="auto", help="throughput and memory (auto)"
    )
    for name, meaning in GATED.items():
        against.add_argument(f"--gate-{name}", type=float, metavar="X", help=f"{meaning} ({default_of(name)})")
    for command in (record, against):
        command.add_argument(
            "--model", choices=tuple(PRESETS), default="moe", help="entry point whose defaults the flags change"
        )
    listing = commands.add_parser("list", help="the records of an archive")
    listing.add_argument("archive", metavar="DIR", help="folder of a job's records")
    for command in (record, against, listing):
        command.add_argument("--json", metavar="FILE", help="also write the result there")
    arguments = parser.parse_args(own)
    _check(arguments, job)
    if arguments.json:
        check_writable_file(arguments.json, "--json")
    return arguments, job


def _check(arguments: argparse.Namespace, job: list[str] | None) -> None:
    for name, least in (("steps", 1), ("warmup", 0)):
        value = getattr(arguments, name, least)
        if value < least:
            raise ConfigError(f"--{name}", value, "too few steps", f"use at least {least}")
    if arguments.command == "compare":
        arguments.limits = given_limits(arguments)
    if arguments.command == "compare" and len(arguments.records) != (0 if arguments.against else 2):
        shown = " ".join(arguments.records)
        raise ConfigError("RECORD", shown, "needs two records, or one with --against", "name the baseline first")
    if job is not None and (arguments.command == "list" or (arguments.command == "compare" and not arguments.against)):
        raise ConfigError("--", " ".join(job), f"{arguments.command} of what is there runs nothing", "drop these words")


def measure(
    resolved: ResolvedConfig, name: str, course: tuple[int, int], prepare: Callable[[Session], None]
) -> Record | None:
    """Run the job's first steps.

    Args:
        resolved: The job.
        name: Of the record.
        course: Steps whose time is left out, and steps behind them.
        prepare: Called with the session before its first step, on all ranks.

    Returns:
        What came out; ``None`` on ranks other than the first.
    """
    environment = RankEnvironment.from_mapping(read_environment())
    training = resolved.config.training.model_copy(update={"train_iters": sum(course)})
    config = resolved.config.model_copy(update={"training": training})
    device = choose_device(config.training.device, environment)
    if device.type == "cpu" and config.backend.host_allocator == "auto":
        keep_freed_memory()
    for warning in validate(config, environment.world_size, device.type):
        if environment.is_main:
            print(f"warning: {warning}", file=sys.stderr)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    with distributed_session(environment, timeout, device), tempfile.TemporaryDirectory() as folder:
        mesh = ParallelMesh.build(config.parallel, device.type, config.model.num_kv_heads)
        session = build_session(config, mesh, device, Path(config.activation.activation_offload_dir or folder))
        session.provenance = resolved.provenance
        try:
            prepare(session)
            started = describe_start(session, dataclasses.replace(resolved, config=config))
            observed = observe_run(session, *course)
        finally:
            session.close()
    if not environment.is_main:
        return None
    return Record(name, observed, started, installed_packages(), to_yaml(resolved.config, resolved.provenance))


def record(arguments: argparse.Namespace, job: list[str]) -> int:
    """Run and archive."""
    archive, may_replace = Path(arguments.archive), arguments.replace
    resolved = resolve_config(job, read_environment(), PRESETS[arguments.model], "tools/baseline.py")
    name = record_name(software(), arguments.label)

    def prepare(session: Session) -> None:
        is_first = session.mesh.rank == 0
        together(
            lambda: check_room(archive, name, may_replace=may_replace) if is_first else None, session.mesh.world_group
        )

    made = measure(resolved, name, (arguments.warmup, arguments.steps), prepare)
    if made is None:
        return 0
    broken = first_not_finite(made.observed)
    if broken:
        print(f"error: {broken}; nothing was recorded", file=sys.stderr)
        return EXIT_FAILED
    folder = write_record(archive, made, may_replace=may_replace)
    if arguments.json:
        write_json(arguments.json, {"name": made.name, "folder": str(folder), **made.observed})
    Console(width=WIDTH).print(records_table([made], f"recorded {folder}"))
    spread = spread_of(made.observed["step_ms"])
    if spread > Thresholds().throughput:
        print(f"warning: step times spread by {spread:.0%}: the machine was not at rest, throughput says little")
    return 0


def hold_against(arguments: argparse.Namespace, job: list[str] | None) -> int:
    """Compare two records, or run and compare."""
    first = arguments.against or arguments.records[0]
    then = read_record(Path(first), "--against" if arguments.against else "RECORD")
    if arguments.against:
        words = ["--config", str(Path(first) / CONFIG_NAME)] if job is None else job
        resolved = resolve_config(words, read_environment(), PRESETS[arguments.model], "tools/baseline.py")
        num_steps, num_timed = int(then.observed["run"]["steps"]), len(then.observed["step_ms"])
        now = measure(
            resolved,
            f"{record_name(software())} (now)",
            (num_steps - num_timed, num_timed),
            lambda session: check_comparable(described_run(session, num_steps), then, "--against"),
        )
        if now is None:
            return 0
    else:
        now = read_record(Path(arguments.records[1]), "RECORD")
        check_comparable(now.observed["run"], then, "RECORD")
    limits = Thresholds.of(then.observed).with_given(arguments.limits)
    comparison = compare(then, now, limits, arguments.performance)
    if arguments.json:
        write_json(arguments.json, comparison.as_record())
    return show(comparison)


def show(comparison: Comparison) -> int:
    """Print what came out, and return the exit code."""
    print(f"baseline: {comparison.then}\njudged:   {comparison.now}")
    Console(width=WIDTH).print(gate_table(comparison.figures, ""))
    for line in (comparison.performance, *comparison.changes()):
        print(line)
    num_failed, num_figures = comparison.num_failed, len(comparison.figures)
    print(f"REFUSED: {num_failed} of {num_figures} figures failed" if num_failed else "no drift")
    return EXIT_FAILED if num_failed else 0


def show_list(arguments: argparse.Namespace) -> int:
    """List an archive."""
    archive = Path(arguments.archive)
    records, damaged = list_records(archive)
    if not records and not damaged:
        raise ConfigError("DIR", archive, "holds no record", "make one with tools/baseline.py record")
    if arguments.json:
        rows = [{"name": each.name, "environment": each.environment, **each.observed} for each in records]
        write_json(arguments.json, {"records": rows, "damaged": damaged})
    Console(width=WIDTH).print(records_table(records, str(archive)))
    for line in damaged:
        print(f"damaged: {line}")
    return 0


def run() -> int:
    """Do what was asked for."""
    arguments, job = parse(sys.argv[1:])
    if arguments.command == "list":
        return show_list(arguments)
    if arguments.command == "record":
        return record(arguments, job or [])
    return hold_against(arguments, job)


def main() -> int:
    """Entry point with one-line errors."""
    return exit_code_of(run, PeerFailedError)


if __name__ == "__main__":
    raise SystemExit(main())
