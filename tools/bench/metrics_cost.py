#!/usr/bin/env python3
"""Measure what watching a run costs, as a share of its steps, and fail above a limit (1 per cent).

A run of the entry points' code is made with all sinks that are installed: records to a file, the endpoint, TensorBoard.
Timed are, in every step, what the watch does in front of it and behind it, on logging steps the record with its sinks,
and for every collective what the meter around it adds. Reading losses is not in it: a run that shows its loss pays that
in any case. This is exact where comparing runs with and without would drown in the noise of the machine. All flags of
the entry points are accepted; several ranks are measured under torchrun.

    python tools/bench/metrics_cost.py
    python tools/bench/metrics_cost.py --log-interval 1
    torchrun --nproc-per-node 2 tools/bench/metrics_cost.py --expert-model-parallel-size 2
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron_glue.config.environment import RankEnvironment, read_environment
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import resolve_config
from megatron_glue.config.sections import RunConfig
from megatron_glue.config.validation import validate
from megatron_glue.parallel.launch import choose_device, distributed_session
from megatron_glue.parallel.local_ranks import free_port
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.meter import CollectiveMeter
from megatron_glue.training.checkpoint.saving import RunSaver
from megatron_glue.training.checkpoint.store import CheckpointStore
from megatron_glue.training.exit_codes import exit_code_of
from megatron_glue.training.metrics import StepTimer
from megatron_glue.training.monitor import Monitor
from megatron_glue.training.presets import MOE_DEFAULTS
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.step import settle_step, train_step
from megatron_glue.training.telemetry.build import build_observer
from megatron_glue.training.telemetry.observer import RunObserver

NUM_TIMED_CALLS = 10_000


@dataclass
class Costs:
    """Times of one measurement.

    Attributes:
        step_s: Of each step, without what watching it cost.
        watch_s: Of what is done around each step.
        record_s: Of each record.
        num_calls: Collectives per step.
        call_s: What the meter adds to each of them.
    """

    step_s: list[float] = field(default_factory=list)
    watch_s: list[float] = field(default_factory=list)
    record_s: list[float] = field(default_factory=list)
    num_calls: float = 0.0
    call_s: float = 0.0

    def share(self, log_interval: int) -> float:
        """Cost / time of a step, from medians; the first record opens files and is left out."""
        step_s = statistics.median(self.step_s)
        record_s = statistics.median(self.record_s[1:] or self.record_s)
        return (statistics.median(self.watch_s) + self.num_calls * self.call_s + record_s / log_interval) / step_s


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Split this tool's own flags from those of the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--records", type=int, default=6, metavar="N", help="logging steps to measure (default 6)")
    parser.add_argument("--limit", type=float, default=0.01, metavar="X", help="largest share (default 0.01)")
    arguments, rest = parser.parse_known_args()
    for name, value, least in (("--records", arguments.records, 2), ("--limit", arguments.limit, 0)):
        if not value >= least:
            raise ConfigError(name, value, f"below {least}", "give a larger one")
    return arguments, rest


def with_sinks(config: RunConfig, folder: Path) -> RunConfig:
    """Turn on every sink that this environment has, but wandb, which would leave the machine."""
    updates: dict[str, Any] = {"metrics_path": str(folder / "metrics.jsonl"), "metrics_port": free_port()}
    if importlib.util.find_spec("tensorboard") is not None:
        updates["tensorboard_dir"] = str(folder / "tensorboard")
    return config.model_copy(update={"logging": config.logging.model_copy(update=updates)})


def measure(session: Session, observer: RunObserver, num_records: int) -> Costs:
    """Train and time. The numbers of the session's own interval count.

    Args:
        session: At iteration 0.
        observer: Installed around it.
        num_records: Logging steps to make.
    """
    costs, timer = Costs(), StepTimer(session.device)
    log_interval = session.config.logging.log_interval
    for step in range(1, num_records * log_interval + 1):
        is_logging = step % log_interval == 0
        before_s = seconds_of(lambda is_logging=is_logging: observer.begin_step(is_logging=is_logging))
        timer.start()
        result = train_step(session)
        if is_logging:
            result = settle_step(session) or result
        step_s = timer.stop(wait_for_device=is_logging)
        session.metrics.add(result, step_s)
        costs.step_s.append(step_s)
        costs.watch_s.append(before_s + seconds_of(observer.end_step))
        if is_logging:
            session.metrics.flush(session.host_reader, session.mesh.world_group)
            costs.record_s.append(seconds_of(lambda lr=result.lr: observer.log(lr)))
    costs.num_calls = observer.num_collectives / len(costs.step_s)
    costs.call_s = cost_of_metered_call()
    return costs


def seconds_of(function: Callable[[], object]) -> float:
    """Time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def cost_of_metered_call() -> float:
    """What the meter adds to a collective, in seconds: a call of nothing with it, less one without."""
    meter, tensor = CollectiveMeter(), torch.zeros(1)
    metered = meter.around(lambda tensor: None)
    meter.open(is_timing=True)
    times = [
        seconds_of(lambda each=each: [each(tensor) for _ in range(NUM_TIMED_CALLS)])
        for each in (metered, lambda tensor: None)
    ]
    return max(times[0] - times[1], 0.0) / NUM_TIMED_CALLS


def run() -> int:
    """Build, measure, tell, judge."""
    arguments, words = parse_arguments()
    environ = read_environment()
    environment = RankEnvironment.from_mapping(environ)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = with_sinks(resolve_config(words, environ, MOE_DEFAULTS, "tools/bench/metrics_cost.py").config, folder)
        device = choose_device(config.training.device, environment)
        validate(config, environment.world_size, device.type)
        timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
        with distributed_session(environment, timeout, device):
            mesh = ParallelMesh.build(config.parallel, device.type, config.model.num_kv_heads)
            session = build_session(config, mesh, device, folder / "activations")
            saver = RunSaver(CheckpointStore(folder / "run", 1, mesh))
            monitor = Monitor("none", enabled=mesh.rank == 0, total=config.training.train_iters)
            try:
                with build_observer(session, saver, monitor) as observer:
                    costs = measure(session, observer, arguments.records)
            finally:
                session.close()
    log_interval = config.logging.log_interval
    share = costs.share(log_interval)
    if environment.is_main:
        print(
            f"step {1e3 * statistics.median(costs.step_s):.1f} ms; watching it "
            f"{1e3 * statistics.median(costs.watch_s):.3f} ms, {costs.num_calls:.0f} collectives of "
            f"{1e6 * costs.call_s:.1f} us each, a record {1e3 * statistics.median(costs.record_s[1:]):.2f} ms every "
            f"{log_interval} steps: {share:.3%} of a step (limit {arguments.limit:.1%})"
        )
    return 1 if share > arguments.limit else 0


def main() -> int:
    """Entry point with one-line errors."""
    return exit_code_of(run)


if __name__ == "__main__":
    raise SystemExit(main())
