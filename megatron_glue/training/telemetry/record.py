"""The record of a logging step, and the table of all figures that can stand in it.

One table for all sinks: what is not in it is not reported, and what is documented is read from it. It computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class MetricSpec:
    """One figure.

    Attributes:
        name: As it stands in records. Those that only grow end in ``_total`` and start at 0 with each process, unless
            the text says otherwise.
        unit: Of its values; ``1`` for a ratio or a flag.
        doc: What it is, of which ranks, over which time.
        group: What it belongs to, for tables, TensorBoard and wandb.
        is_by_layer: Whether there is one for each MoE layer.
    """

    name: str
    unit: str
    doc: str
    group: Literal["training", "speed", "split", "memory", "glue", "data", "experts", "checkpoints", "watching"]
    is_by_layer: bool = False

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        """What Prometheus calls it."""
        return "counter" if self.name.endswith("_total") else "gauge"


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("loss", "nats/token", "Training loss of the newest step.", "training"),
    MetricSpec("heldout_loss", "nats/token", "Loss on held-out documents, in a record of its own.", "training"),
    MetricSpec("lr", "1", "Learning rate of the newest step.", "training"),
    MetricSpec("grad_norm", "1", "Global gradient norm before clipping, of the newest step.", "training"),
    MetricSpec("skipped_steps_total", "steps", "Updates skipped since iteration 0: gradient not finite.", "training"),
    MetricSpec(
        "loss_spikes_total", "steps", "Losses that jumped far above the usual (--loss-spike-threshold).", "training"
    ),
    MetricSpec("rerun_steps_total", "steps", "Steps run again for rows that found no room.", "training"),
    MetricSpec("tokens_total", "tokens", "Live tokens trained on since iteration 0.", "training"),
    MetricSpec("step_ms", "ms", "Wall time of a step, mean of the interval, largest over ranks.", "speed"),
    MetricSpec("tokens_per_second", "tokens/s", "Live tokens of all ranks per second of step time.", "speed"),
    MetricSpec("tokens_per_second_per_gpu", "tokens/s", "The same, per rank.", "speed"),
    MetricSpec("samples_per_second_per_gpu", "packs/s", "Packs per second and rank.", "speed"),
    MetricSpec("model_tflops_per_gpu", "TFLOP/s", "Arithmetic of the model per rank; recompute is not in it.", "speed"),
    MetricSpec("mfu", "1", "model_tflops_per_gpu / dense peak of the device.", "speed"),
    MetricSpec("device_utilization", "1", "GPU busy by NVML, mean of ranks; on a CPU its threads' time.", "speed"),
    MetricSpec("data_ms", "ms", "Wait for the next batch per step, mean of ranks.", "split"),
    MetricSpec("communication_ms", "ms", "Wait for collectives per step, mean of ranks.", "split"),
    MetricSpec("compute_ms", "ms", "The rest of the step but reload waits, mean of ranks.", "split"),
    MetricSpec("straggler_rank", "rank", "Rank with most time of its own: step without communication.", "split"),
    MetricSpec("straggler_ratio", "1", "Its own time / median own time of ranks; 1: all alike.", "split"),
    MetricSpec("collective_bytes_per_second", "bytes/s", "Payload of collectives, sum of ranks.", "split"),
    MetricSpec("network_bytes_per_second", "bytes/s", "In and out of the first rank's machine, no loopback.", "split"),
    MetricSpec("memory_allocated_bytes", "bytes", "Device memory in use (CPU: resident), largest rank.", "memory"),
    MetricSpec("memory_peak_bytes", "bytes", "The most that it ever was, largest rank.", "memory"),
    MetricSpec("host_memory_bytes", "bytes", "Resident host memory of a process, largest rank.", "memory"),
    MetricSpec("cache_hits_total", "look-ups", "Found in the metadata cache, first rank.", "glue"),
    MetricSpec("cache_misses_total", "look-ups", "Built for the metadata cache, first rank.", "glue"),
    MetricSpec("cache_evictions_total", "values", "Gave way to others, first rank.", "glue"),
    MetricSpec("cache_hit_ratio", "1", "Hits / look-ups since the last reading.", "glue"),
    MetricSpec("host_reads_per_step", "reads", "Device values read inside steps, first rank.", "glue"),
    MetricSpec("reload_wait_ms", "ms", "Wait for offloaded activations per step, mean of ranks.", "glue"),
    MetricSpec("overlap_efficiency", "1", "Hidden copy time / what could be hidden, first rank.", "glue"),
    MetricSpec("packing_efficiency", "1", "Live tokens / places of the interval's packs.", "data"),
    MetricSpec("length_drift", "1", "Distance of recent segment lengths from the epoch's, 0 to 1.", "data"),
    MetricSpec("length_drift_alarm", "1", "1 while it exceeds --length-drift-alarm.", "data"),
    MetricSpec("expert_load_max", "1", "Most loaded expert, multiple of an even share.", "experts", True),
    MetricSpec("expert_load_min", "1", "Least loaded expert, multiple of an even share.", "experts", True),
    MetricSpec("dead_experts", "experts", "Without a token for --dead-expert-alarm records.", "experts", True),
    MetricSpec("expert_imbalance_alarm", "1", "1 while a load exceeds --expert-imbalance-alarm.", "experts"),
    MetricSpec("dead_expert_alarm", "1", "1 while any expert is dead.", "experts"),
    MetricSpec("dropped_tokens_total", "pairs", "(token, choice) pairs dropped.", "experts"),
    MetricSpec("aux_loss", "1", "Load-balancing loss of the newest step.", "experts"),
    MetricSpec("z_loss", "1", "Router z-loss of the newest step.", "experts"),
    MetricSpec("checkpoint_bytes_per_second", "bytes/s", "Write rate of the newest save, all ranks.", "checkpoints"),
    MetricSpec("saves_total", "saves", "Checkpoints published.", "checkpoints"),
    MetricSpec("failed_saves_total", "saves", "Saves that failed.", "checkpoints"),
    MetricSpec("save_stall_ms_total", "ms", "Time that training stood still for saves, first rank.", "checkpoints"),
    MetricSpec("observation_ms", "ms", "What the newest record but this cost the first rank.", "watching"),
)
"""All figures, in the order of the documentation."""

SPECS: dict[str, MetricSpec] = {spec.name: spec for spec in METRICS}


@dataclass(frozen=True)
class MetricRecord:
    """What is known at one iteration. A figure that was not measured is absent.

    Attributes:
        iteration: Counted from 1.
        time_s: Seconds since the epoch.
        values: Name -> value.
        by_layer: Name -> layer of the whole model -> value.
        expert_load: Layer -> load of each expert as a multiple of an even share; empty where it would be too long.
        alarms: Lines for the user about what has just begun or ended.
    """

    iteration: int
    time_s: float
    values: Mapping[str, float]
    by_layer: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    expert_load: Mapping[int, list[float]] = field(default_factory=dict)
    alarms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.values:
            assert name in SPECS, f"{name} is not in the table of metrics"
            assert not SPECS[name].is_by_layer, f"{name} is known by layer"
        for name in self.by_layer:
            assert name in SPECS, f"{name} is not in the table of metrics"
            assert SPECS[name].is_by_layer, f"{name} is one number"
