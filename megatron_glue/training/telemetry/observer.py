"""Watches a run from step to step, and makes a record of each logging step for all sinks.

Between logging steps it only adds up host numbers. On a logging step the losses have to be read in any case; it reads
what else there is behind them, brings the figures of all ranks together, and hands the record to the sinks, which stand
on the first rank alone. A sink that fails is told and left out: reporting never ends a run.

Stands beside the loop, which tells it when a step begins and ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from megatron_glue.parallel.meter import CollectiveMeter
from megatron_glue.training.checkpoint.saving import RunSaver
from megatron_glue.training.session import Session
from megatron_glue.training.summary import peak_memory_bytes
from megatron_glue.training.telemetry import machine
from megatron_glue.training.telemetry.expert_watch import ExpertWatch
from megatron_glue.training.telemetry.flops import ModelFlops, peak_tflops
from megatron_glue.training.telemetry.lengths import LengthDrift
from megatron_glue.training.telemetry.ranks import RankFigures, find_straggler, mean_of, table_of_ranks
from megatron_glue.training.telemetry.record import MetricRecord
from megatron_glue.training.telemetry.sinks.sink import MetricSink

MAX_LOADS = 4096
"""Experts of all layers up to which a record holds the load of each: above, it would be longer than all else."""


@dataclass
class _Interval:
    """What has been added up since the last record.

    Attributes:
        num_steps: Steps.
        num_timed: Those of them whose waits for collectives were measured.
        flops: Arithmetic of the model, all ranks.
        num_tokens: Live tokens of their packs.
        waited_s: Of the loader at the begin.
        collective_bytes: Of the meter at the begin.
    """

    waited_s: float
    collective_bytes: int
    num_steps: int = 0
    num_timed: int = 0
    flops: int = 0
    num_tokens: int = 0


class RunObserver:
    """The watch of one rank. All ranks build it and call it alike. Collectives are measured from ``__enter__`` on.

    Args:
        session: The run, before its first step.
        saver: Its checkpoints.
        sinks: Where records go; none on all ranks but the first.
        say: Shows a line to the user.
    """

    def __init__(
        self, session: Session, saver: RunSaver, sinks: Sequence[MetricSink] = (), say: Callable[[str], None] = print
    ) -> None:
        config = session.config
        logging = config.logging
        self._session, self._saver, self._sinks, self._say = session, saver, list(sinks), say
        self._meter = CollectiveMeter.on(session.device)
        self._flops = ModelFlops(config, session.data.tokenizer.vocab_size)
        self._peak_tflops = peak_tflops(config, session.device)
        self._utilization = machine.Utilization(session.device)
        self._network = machine.NetworkRate() if self._sinks else None
        self._drift = LengthDrift(session.data.loader.epoch_segment_lengths, logging.length_drift_alarm)
        self._moe_layers = [layer for layer in range(config.model.num_layers) if config.moe.is_moe_layer(layer)]
        self._experts = ExpertWatch(self._moe_layers, logging.expert_imbalance_alarm, logging.dead_expert_alarm)
        self._seen_counts: list[list[int]] = []
        self._seen_cache = (0, 0)
        self._seen_reads = session.num_step_host_reads
        self._accelerator_read_at: int | None = None
        self._num_steps_since_reading = 0
        self._cost_ms = 0.0
        self._interval = self._new_interval()

    def __enter__(self) -> RunObserver:
        self._meter.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_collectives(self) -> int:
        """Collectives that this rank has started in its steps."""
        return self._meter.num_calls

    def begin_step(self, *, is_logging: bool) -> None:
        """Note that a step begins.

        Args:
            is_logging: Whether a record follows it. On a GPU only waits of such steps are measured.
        """
        is_timing = is_logging or self._session.device.type != "cuda"
        self._interval.num_timed += is_timing
        self._meter.open(is_timing=is_timing)

    def end_step(self) -> None:
        """Note that a step has ended, on the host."""
        self._meter.close()
        interval, loader = self._interval, self._session.data.loader
        lengths_S = loader.step_segment_lengths
        interval.num_steps += 1
        self._num_steps_since_reading += 1
        interval.num_tokens += loader.step_valid_tokens
        if len(lengths_S):
            interval.flops += self._flops.of_step(lengths_S)
            self._drift.add(lengths_S)

    def log(self, lr: float) -> None:
        """Make a record and give it to the sinks; a collective. The host waits for the device.

        Args:
            lr: Learning rate of the newest step.
        """
        start = time.perf_counter()
        session, interval = self._session, self._interval
        session.metrics.flush(session.host_reader, session.mesh.world_group)
        mesh = session.mesh
        table = table_of_ranks(self._own_figures(), mesh.rank, mesh.world_size, mesh.world_group)
        accelerator = self._accelerator_figures()
        self._interval = self._new_interval()
        if self._sinks:
            values = {
                **self._training_figures(lr),
                **self._speed_figures(interval, table),
                **_rank_figures(table),
                **accelerator,
                **self._save_figures(table),
                "observation_ms": self._cost_ms,
            }
            self._write(self._with_alarms(values, interval))
        self._cost_ms = 1e3 * (time.perf_counter() - start)

    def log_evaluation(self, heldout_loss: float) -> None:
        """Give the loss of an evaluation, in nats per token, to the sinks."""
        self._write(MetricRecord(self._session.iteration, time.time(), {"heldout_loss": heldout_loss}))
        # What has passed since belongs to no step; rates would be too low.
        if self._interval.num_steps == 0:
            self._interval = self._new_interval()

    def close(self) -> None:
        """Let go of the meter and of the sinks. May be called twice."""
        self._meter.__exit__()
        while self._sinks:
            sink = self._sinks.pop()
            try:
                sink.close()
            except Exception as error:
                self._say(f"warning: {sink.name} was not closed: {_line(error)}")

    def _new_interval(self) -> _Interval:
        return _Interval(
            waited_s=self._session.data.loader.waited_s,
            collective_bytes=self._meter.num_bytes,
        )

    def _own_figures(self) -> RankFigures:
        session, interval = self._session, self._interval
        num_steps = max(interval.num_steps, 1)
        step_ms = 1e3 * sum(session.metrics.step_times_s[-num_steps:]) / num_steps
        reloads = session.built.activation.step_times(last_steps=num_steps)
        is_cuda = session.device.type == "cuda"
        resident_bytes = machine.resident_bytes()
        utilization = self._utilization.read()
        return RankFigures(
            step_ms=step_ms,
            data_ms=1e3 * (session.data.loader.waited_s - interval.waited_s) / num_steps,
            communication_ms=self._meter.take_waited_ms() / max(interval.num_timed, 1),
            reload_wait_ms=sum(step.reload_wait_ms for step in reloads) / num_steps,
            allocated_bytes=torch.cuda.memory_allocated(session.device) if is_cuda else resident_bytes,
            # The kernel keeps the peak of resident memory less exactly than the present value.
            peak_bytes=max(peak_memory_bytes(session.device), 0 if is_cuda else resident_bytes),
            host_bytes=resident_bytes,
            utilization=math.nan if utilization is None else utilization,
            collective_bytes=self._meter.num_bytes - interval.collective_bytes,
            saved_bytes=self._saver.written[0] if self._saver.written else 0,
        )

    def _training_figures(self, lr: float) -> dict[str, float]:
        session, metrics = self._session, self._session.metrics
        values: dict[str, float] = {
            "loss": metrics.losses[-1],
            "lr": lr,
            "grad_norm": metrics.grad_norms[-1],
            "tokens_total": metrics.num_tokens,
            "skipped_steps_total": session.optimizer.num_skipped_updates,
            "loss_spikes_total": metrics.num_loss_spikes,
            "rerun_steps_total": len(session.reruns),
        }
        if self._moe_layers:
            values["dropped_tokens_total"] = metrics.num_dropped
            values |= dict(zip(("aux_loss", "z_loss"), metrics.aux_losses, strict=False))
        return values

    def _speed_figures(self, interval: _Interval, table: Sequence[RankFigures]) -> dict[str, float]:
        session = self._session
        config, num_ranks, num_steps = session.config, len(table), max(interval.num_steps, 1)
        step_s = max(max(figures.step_ms for figures in table) / 1e3, 1e-9)
        tokens_per_second = session.metrics.tokens_per_second(last_steps=config.logging.log_interval)
        tflops = interval.flops / num_steps / step_s / num_ranks / 1e12
        values = {
            "step_ms": 1e3 * step_s,
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_gpu": tokens_per_second / num_ranks,
            "samples_per_second_per_gpu": config.training.global_batch_size / step_s / num_ranks,
            "model_tflops_per_gpu": tflops,
            "collective_bytes_per_second": sum(f.collective_bytes for f in table) / num_steps / step_s,
            "packing_efficiency": interval.num_tokens / num_steps / session.data.loader.step_places,
        }
        if self._peak_tflops is not None:
            values["mfu"] = tflops / self._peak_tflops
        if self._network is not None and (rate := self._network.read()) is not None:
            values["network_bytes_per_second"] = rate
        return values

    def _accelerator_figures(self) -> dict[str, float]:
        """Counters of the three optimisations on this rank, every ``--metrics-interval`` iterations."""
        session = self._session
        read_at, interval = self._accelerator_read_at, session.config.accelerator.metrics_interval
        if read_at is not None and session.iteration // interval == read_at // interval:
            return {}
        self._accelerator_read_at = session.iteration
        num_steps, self._num_steps_since_reading = max(self._num_steps_since_reading, 1), 0
        kinds = session.built.metadata_cache.manager.statistics.as_dict().values()
        hits, misses = sum(kind["hits"] for kind in kinds), sum(kind["misses"] for kind in kinds)
        num_new = hits + misses - sum(self._seen_cache)
        num_reads = session.num_step_host_reads - self._seen_reads
        reloads = session.built.activation.step_times(last_steps=num_steps)
        values = {
            "cache_hits_total": hits,
            "cache_misses_total": misses,
            "cache_evictions_total": sum(kind["evictions"] for kind in kinds),
            "cache_hit_ratio": (hits - self._seen_cache[0]) / num_new if num_new else 0.0,
            "host_reads_per_step": num_reads / num_steps,
        }
        if any(step.copy_ms for step in reloads):
            hidden_ms = sum(step.hidden_copy_ms for step in reloads)
            possible_ms = min(sum(step.copy_ms for step in reloads), sum(step.compute_ms for step in reloads))
            values["overlap_efficiency"] = min(1.0, hidden_ms / possible_ms) if possible_ms else 0.0
        self._seen_cache, self._seen_reads = (hits, misses), session.num_step_host_reads
        return values

    def _save_figures(self, table: Sequence[RankFigures]) -> dict[str, float]:
        saver = self._saver
        values: dict[str, float] = {
            "saves_total": saver.num_saved,
            "failed_saves_total": saver.num_failed,
            "save_stall_ms_total": 1e3 * saver.stall_seconds,
        }
        if saver.written is not None:
            num_bytes = sum(figures.saved_bytes for figures in table)
            values["checkpoint_bytes_per_second"] = num_bytes / max(saver.written[1], 1e-9)
        return values

    def _with_alarms(self, values: dict[str, float], interval: _Interval) -> MetricRecord:
        alarms: list[str] = []
        if (drift := self._drift.value()) is not None:
            alarms += self._drift.alarms(drift)
            values |= {"length_drift": drift, "length_drift_alarm": float(self._drift.is_alarming)}
        by_layer: dict[str, dict[int, float]] = {}
        load: dict[int, list[float]] = {}
        if counts := self._new_counts():
            figures = self._experts.look(counts)
            load = figures.load
            by_layer = {
                "expert_load_max": {layer: max(row) for layer, row in load.items()},
                "expert_load_min": {layer: min(row) for layer, row in load.items()},
                "dead_experts": {layer: float(count) for layer, count in figures.num_dead.items()},
            }
            values["expert_imbalance_alarm"] = float(figures.is_imbalanced)
            values["dead_expert_alarm"] = float(any(figures.num_dead.values()))
            alarms += figures.alarms
        if sum(map(len, load.values())) > MAX_LOADS:
            load = {}
        return MetricRecord(self._session.iteration, time.time(), values, by_layer, load, tuple(alarms))

    def _new_counts(self) -> list[list[int]]:
        """Pairs per MoE layer and expert since the last record."""
        counts = self._session.metrics.expert_counts
        seen = self._seen_counts or [[0] * len(row) for row in counts]
        self._seen_counts = [list(row) for row in counts]
        return [[now - then for now, then in zip(*rows, strict=True)] for rows in zip(counts, seen, strict=True)]

    def _write(self, record: MetricRecord) -> None:
        for sink in list(self._sinks):
            try:
                sink.write(record)
            except Exception as error:
                self._sinks.remove(sink)
                self._say(f"warning: {sink.name} gets no further metrics: {_line(error)}")
                with suppress(Exception):
                    sink.close()


def _rank_figures(table: Sequence[RankFigures]) -> dict[str, float]:
    """What is read from the table of all ranks, apart from speed."""
    rank, ratio = find_straggler(table)
    compute = [f.own_ms - f.data_ms - f.reload_wait_ms for f in table]
    values: dict[str, float] = {
        "data_ms": sum(f.data_ms for f in table) / len(table),
        "communication_ms": sum(f.communication_ms for f in table) / len(table),
        "compute_ms": max(sum(compute) / len(table), 0.0),
        "reload_wait_ms": sum(f.reload_wait_ms for f in table) / len(table),
        "straggler_rank": rank,
        "straggler_ratio": ratio,
        "memory_allocated_bytes": max(f.allocated_bytes for f in table),
        "memory_peak_bytes": max(f.peak_bytes for f in table),
        "host_memory_bytes": max(f.host_bytes for f in table),
    }
    if (utilization := mean_of([f.utilization for f in table])) is not None:
        values["device_utilization"] = utilization
    return values


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
