"""From a command line to a trained model: what ``pretrain_gpt.py`` and ``pretrain_moe.py`` call.

It resolves and checks the configuration, starts the process group, finds the run's folder, builds or resumes the
session, trains, samples and summarises. Errors that a user can cause leave as one line on standard error and exit code
2 (the request cannot be met as written) or 1 (something failed on the way).
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch.autograd import set_detect_anomaly

from megatron_glue.config.environment import RankEnvironment, read_environment
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.loading import ResolvedConfig, describe, resolve_config
from megatron_glue.config.sections import RunConfig
from megatron_glue.config.validation import validate
from megatron_glue.parallel.agreement import is_anomaly, is_lost_peer, is_out_of_memory, together
from megatron_glue.parallel.collectives import broadcast_, max_over_ranks
from megatron_glue.parallel.host_allocator import keep_freed_memory
from megatron_glue.parallel.launch import choose_device, distributed_session
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.rank_board import RankBoard
from megatron_glue.training.checkpoint.facts import damage_named
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.saving import RunSaver
from megatron_glue.training.checkpoint.source import Source, Start, find_source, load_source
from megatron_glue.training.checkpoint.store import CheckpointStore
from megatron_glue.training.checkpoint.write import FACTS_NAME
from megatron_glue.training.closing import collect_summary, sample
from megatron_glue.training.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from megatron_glue.training.faults import FaultWatch, TrainingFaultError
from megatron_glue.training.generation import printable
from megatron_glue.training.isolation import IsolationError, prove_isolation
from megatron_glue.training.loop import Run, train
from megatron_glue.training.memory_shortage import describe_shortage, first_sentence
from megatron_glue.training.monitor import Monitor
from megatron_glue.training.planning.dry_run import dry_run
from megatron_glue.training.rank_check import RanksDifferError
from megatron_glue.training.run_environment import software
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.start_check import check_same_start
from megatron_glue.training.start_record import record_start
from megatron_glue.training.stopping import SignalListener, StopVote
from megatron_glue.training.summary import check_writable_file, print_summary, write_json
from megatron_glue.training.telemetry.build import build_observer
from megatron_glue.training.watchdog import Watchdog, WatchPlace

SUMMARY_NAME = "summary.json"


def main(defaults: RunConfig, argv: Sequence[str] | None = None, watch: Callable[[Session], None] | None = None) -> int:
    """Run one training from the command line.

    Args:
        defaults: The entry point's own defaults.
        argv: Words behind the program's name; ``None``: those of this process.
        watch: Called with the session before its first step, by tools that observe a run.

    Returns:
        The exit code.
    """
    start_s = time.monotonic()
    environ = read_environment()
    environment = RankEnvironment()
    try:
        environment = RankEnvironment.from_mapping(environ)
        resolved = resolve_config(sys.argv[1:] if argv is None else argv, environ, defaults, may_dry_run=True)
        if resolved.dry_run is not None:
            if environment.is_main:
                dry_run(resolved)
            return 0
        return _run(resolved, environment, watch, start_s)
    except ConfigError as error:
        return _report(error, EXIT_USAGE, environment)
    except (CheckpointError, IsolationError, RanksDifferError, TrainingFaultError, OSError) as error:
        return _report(error, EXIT_FAILED, environment)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            remedy = "make the model smaller, or split it over more ranks"
            line = f"out of memory before or behind training: {first_sentence(error)}; {remedy}"
            return _report(line, EXIT_FAILED, environment)
        if is_anomaly(error):
            return _report(f"--detect-anomaly: {error}; the warning above shows its forward", EXIT_FAILED, environment)
        if not is_lost_peer(error):
            raise
        return _report(f"stopped because another rank failed: {error}", EXIT_FAILED, environment)
    except KeyboardInterrupt:
        line = "interrupted; what was trained since the last checkpoint is lost, the same --save folder resumes from it"
        return _report(line, EXIT_INTERRUPTED, environment)


def _report(error: object, code: int, environment: RankEnvironment) -> int:
    """Say what is wrong in one line; ranks other than the first name themselves."""
    rank = f"[rank {environment.rank}] " if environment.rank else ""
    line = " ".join(str(error).split())
    print(f"error: {rank}{line}", file=sys.stderr, flush=True)
    return code


def _run(
    resolved: ResolvedConfig, environment: RankEnvironment, watch: Callable[[Session], None] | None, start_s: float
) -> int:
    config = resolved.config
    logging.basicConfig(level=config.accelerator.log_level.upper(), format="%(name)s: %(message)s")
    device = choose_device(config.training.device, environment)
    if device.type == "cpu" and config.backend.host_allocator == "auto":
        keep_freed_memory()
    warnings = [*resolved.warnings, *validate(config, environment.world_size, device.type)]
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    with distributed_session(environment, timeout, device):
        check_same_start(config, software())
        mesh = ParallelMesh.build(config.parallel, device.type, config.model.num_kv_heads)
        if config.training.prove_isolation:
            _prove_isolation(config, mesh, device)
        store = CheckpointStore(_run_folder(config, mesh), config.training.keep_last, mesh)
        try:
            store.claim()
            together(lambda: _check_summary_path(config, mesh), mesh.world_group)
            source = find_source(store, config.training.load)
            saver = _build_saver(config, store, device)
            session = _build_or_clean_up(config, store, mesh, device)
            session.provenance = resolved.provenance
            try:
                start = _resume(session, store, source)
                if _has_ended(session, source) and start is not None and _is_all_done(session, start.path):
                    return 0
                monitor = _open(session, start, resolved, warnings)
                saver.say = monitor.say
                if watch is not None:
                    watch(session)
                try:
                    monitor.say(record_start(session, resolved, store.root, None if start is None else start.path))
                    heldout_loss = _train(session, saver, monitor, start_s)
                finally:
                    monitor.close()
                if heldout_loss is not None:
                    _close(session, saver, heldout_loss)
                return _report_last_save(saver, environment)
            finally:
                saver.close()
                session.close()
        finally:
            store.release()


def _train(session: Session, saver: RunSaver, monitor: Monitor, start_s: float) -> float | None:
    """Run the loop while signals ask it to stop; the held-out loss, or ``None`` if it was asked."""
    minutes = session.config.training.exit_duration_in_mins
    deadline = start_s + 60 * minutes if minutes else None
    faults = FaultWatch(session, monitor.say)
    place = WatchPlace(session.mesh.rank, saver.store.root, session.heartbeat, saver.finish_in_time)
    board = RankBoard.of_run(session.mesh.rank, session.mesh.world_size)
    with (
        SignalListener(session.mesh.rank) as signals,
        # Switches off, too, what another run in this process had switched on.
        set_detect_anomaly(session.config.faults.detect_anomaly),
        Watchdog(place, session.config.faults.watchdog_timeout_s, board),
        build_observer(session, saver, monitor) as observer,
    ):
        vote = StopVote(signals, session.mesh.world_group, deadline)
        try:
            return train(Run(session, saver, monitor, observer, vote, faults))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingFaultError(describe_shortage(session, error)) from error


def _prove_isolation(config: RunConfig, mesh: ParallelMesh, device: torch.device) -> None:
    report = prove_isolation(config, mesh, device)
    if mesh.rank == 0:
        print(f"isolation proven: {report.describe()}", flush=True)


def _build_saver(config: RunConfig, store: CheckpointStore, device: torch.device) -> RunSaver:
    if not config.training.async_save:
        return RunSaver(store)
    return RunSaver.in_background(store, device, timedelta(minutes=config.parallel.distributed_timeout_minutes))


def _resume(session: Session, store: CheckpointStore, source: Source | None) -> Start | None:
    """Load the checkpoint to start from, if there is one."""
    if source is None:
        return None
    may_fall_back = session.config.training.load_fallback
    start = load_source(store, source, session.training_state(), may_fall_back=may_fall_back)
    # Counters and position are the session's own: only it knows what must be in them.
    with damage_named(start.path / FACTS_NAME):
        session.adopt(start.loaded)
    return start


def _has_ended(session: Session, source: Source | None) -> bool:
    """Whether this run, not one that it started from, has made all its iterations."""
    return source is not None and source.is_own and session.iteration >= session.config.training.train_iters


def _report_last_save(saver: RunSaver, environment: RankEnvironment) -> int:
    """The exit code of a run that has come to its end: what its last save could not write is lost."""
    if saver.error is None:
        return 0
    return _report(f"the last checkpoint of the run is missing: {saver.error}", EXIT_FAILED, environment)


def _run_folder(config: RunConfig, mesh: ParallelMesh) -> Path:
    """``--save``, or a folder of its own for this start, the same on all ranks."""
    if config.training.save is not None:
        return Path(config.training.save)
    now = broadcast_(torch.tensor([int(time.time())]), mesh.world_group)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(int(now[0])))
    folder = Path("runs") / f"{config.training.name}-{stamp}"
    taken = broadcast_(torch.tensor([sum(1 for _ in Path("runs").glob(f"{folder.name}*"))]), mesh.world_group)
    return folder.with_name(f"{folder.name}-{int(taken[0]) + 1}") if int(taken[0]) else folder


def _check_summary_path(config: RunConfig, mesh: ParallelMesh) -> None:
    if mesh.rank == 0 and config.logging.summary_path is not None:
        check_writable_file(config.logging.summary_path, flag_of("summary_path"))


def _offload_dir(config: RunConfig, folder: Path) -> Path:
    return Path(config.activation.activation_offload_dir or folder / "activations")


def _open(session: Session, start: Start | None, resolved: ResolvedConfig, warnings: list[str]) -> Monitor:
    """Start the monitor and say what was decided, before the first step."""
    config = session.config
    monitor = Monitor(
        config.logging.progress,
        enabled=session.mesh.rank == 0,
        total=config.training.train_iters,
        start=session.iteration,
    )
    for warning in warnings:
        monitor.say(f"warning: {warning}")
    monitor.say(_opening(session, resolved))
    if start is not None:
        resuming = f"resuming from {start.path} at iteration {session.iteration}"
        for line in (*start.warnings, resuming, *start.notes):
            monitor.say(line)
    return monitor


def _opening(session: Session, resolved: ResolvedConfig) -> str:
    data, built = session.data, session.built
    skipped = f", {data.train.num_skipped_empty} empty texts skipped" if data.train.num_skipped_empty else ""
    return "\n".join(
        [
            describe(resolved),
            f"{session.mesh.describe()} on {session.device}, {session.engine.describe()}",
            session.executor.describe(),
            f"model: {session.engine.num_local_parameters():,} parameters on this rank",
            f"kernels: {built.backends.describe()}",
            built.activation.describe(),
            f"data: {data.train.num_documents:,} documents, {data.train.num_tokens:,} tokens; held out: "
            f"{data.heldout.num_documents:,} documents{skipped}",
            f"packing efficiency {data.loader.packing_efficiency:.2%}",
        ]
    )


def _build_or_clean_up(config: RunConfig, store: CheckpointStore, mesh: ParallelMesh, device: torch.device) -> Session:
    """Build the session; a start that is refused leaves no empty folder behind."""
    try:
        return build_session(config, mesh, device, _offload_dir(config, store.root))
    except Exception:
        store.release()
        if mesh.rank == 0:
            with suppress(OSError):
                store.root.rmdir()
        raise


def _is_all_done(session: Session, latest: Path) -> bool:
    """Say that a loaded run has finished, and write its summary once more.

    Returns:
        False, on all ranks, if it was stopped between its last checkpoint and its summary: then the rest is to be done.
    """
    summary_path, kept = session.config.logging.summary_path, latest.parent / SUMMARY_NAME
    is_whole = 0
    if session.mesh.rank == 0:
        print(f"{latest}: the run has finished its iterations (--train-iters {session.config.training.train_iters})")
        with suppress(OSError, ValueError):
            summary = json.loads(kept.read_text())
            is_whole = int(summary["iterations"] == session.iteration)
            if is_whole and summary_path is not None:
                write_json(summary_path, summary)
    return max_over_ranks(is_whole, session.mesh.world_group) == 1


def _close(session: Session, saver: RunSaver, heldout_loss: float) -> None:
    """Sample and summarise; collective, rank 0 shows."""
    logging_config = session.config.logging
    continuation = sample(session)
    summary = collect_summary(session, heldout_loss, saver)
    if session.mesh.rank != 0:
        return
    if continuation:
        shown = printable(logging_config.sample_prompt + continuation)
        print(f"\nsample continuation:\n{shown}\n")
    print_summary(summary)
    write_json(saver.store.root / SUMMARY_NAME, summary)
    if logging_config.summary_path is not None:
        write_json(logging_config.summary_path, summary)
