"""All parts of one run, built once in a visible order and passed on explicitly. There is no global state beside it.

``build_session`` turns a validated configuration into model, engine, optimizer and loader; the step, the evaluation,
the loop and the tools work on what it returns. It trains nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import RunConfig
from megatron_glue.data.documents import DocumentSet, build_datasets
from megatron_glue.data.heldout import EvalPlan, eval_batches, unigram_entropy
from megatron_glue.data.loader import BatchLoader, BatchPlan
from megatron_glue.data.pack_stream import PackStream, StreamPosition
from megatron_glue.data.tokenizer import Tokenizer, build_tokenizer
from megatron_glue.models.build import BuildPlace, BuiltModel, build_model
from megatron_glue.models.parallelize import parallelize
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.agreement import together
from megatron_glue.parallel.collectives import is_same_on_all_ranks
from megatron_glue.parallel.data_parallel import DataParallelEngine
from megatron_glue.parallel.engines.deepspeed_config import DeepSpeedRun
from megatron_glue.parallel.gather import differing_replicas
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.checkpoint.store import LoadedCheckpoint, TrainingState
from megatron_glue.training.executor import StepExecutor, build_executor
from megatron_glue.training.heartbeat import Heartbeat
from megatron_glue.training.lr_schedule import LearningRateSchedule
from megatron_glue.training.metrics import RunMetrics, StepResult
from megatron_glue.training.optimizer import GuardedAdamW, build_optimizer
from megatron_glue.training.optimizer_zero import ZeroAdamW
from megatron_glue.training.phases import name_phases
from megatron_glue.types import PackedBatch


@dataclass(frozen=True)
class SessionData:
    """Documents of a run and how they are packed.

    Attributes:
        tokenizer: Text to ids and back.
        train: Training documents.
        heldout: Documents that training never sees.
        loader: Training batches of this rank.
        eval_plan: Which held-out packs are evaluated, and by whom.
    """

    tokenizer: Tokenizer
    train: DocumentSet
    heldout: DocumentSet
    loader: BatchLoader
    eval_plan: EvalPlan
    _kept: dict[str, Any] = field(default_factory=dict, repr=False)

    def eval_batches(self, device: torch.device) -> list[PackedBatch]:
        """This rank's held-out batches; packed once, then kept."""
        if "eval_batches" not in self._kept:
            self._kept["eval_batches"] = eval_batches(self.heldout, self.eval_plan, device=device)
        return self._kept["eval_batches"]

    def unigram_entropy(self) -> float:
        """Loss of predicting held-out labels by frequency alone, nats per token; computed once, then kept."""
        if "unigram_entropy" not in self._kept:
            self._kept["unigram_entropy"] = unigram_entropy(self.train, self.heldout, self.eval_plan)
        return self._kept["unigram_entropy"]


@dataclass(frozen=True)
class StepStart:
    """Where a session stood before a step, so that the step can be run again. All else follows from it: dropout from
    the iteration, the learning rate from the iteration and the updates skipped before.

    Attributes:
        iteration: Steps done.
        data_position: First pack that no step had consumed.
        num_micro_batches: Micro-batches trained on.
    """

    iteration: int
    data_position: StreamPosition
    num_micro_batches: int


@dataclass(frozen=True)
class UnsettledStep:
    """The newest step, while nobody has looked yet whether all its rows reached their experts.

    Attributes:
        start: Where it began.
        result: What it reported.
    """

    start: StepStart
    result: StepResult


@dataclass(frozen=True)
class Rerun:
    """A step that was run again because rows found no room.

    Attributes:
        iteration: The step, counted from 1.
        num_rows: Rows without room in its first run, over all ranks, layers and micro-batches.
    """

    iteration: int
    num_rows: int


@dataclass
class Session:
    """The parts of one run.

    Attributes:
        config: What it was built from.
        mesh: Ranks.
        device: Where this rank computes.
        built: Model, or the parts of it that this rank holds; activation managers, metadata cache, chosen kernels.
        engine: The data-parallel engine around the model.
        executor: Runs passes through it, in a pipeline or not.
        optimizer: AdamW over the engine's parameters.
        schedule: Learning rate by update.
        data: Documents and loader.
        host_reader: Counts device-to-host reads of the model and of the optimizer's fallback.
        metrics: Losses and timings.
        iteration: Optimizer steps done since the run began.
        num_micro_batches: Micro-batches that this process trained on.
        num_step_host_reads: Device-to-host reads inside this process' training steps; logging reads are not among them.
        unsettled: The newest step under ``--moe-static-capacity-factor``, until :func:`settle_step` or the next step.
        reruns: Steps of this process that were run again.
        provenance: Where each field of the configuration came from; checkpoints keep it.
        heartbeat: How far the training thread has come, for a watchdog.
    """

    config: RunConfig
    mesh: ParallelMesh
    device: torch.device
    built: BuiltModel
    engine: DataParallelEngine
    executor: StepExecutor
    optimizer: GuardedAdamW | ZeroAdamW
    schedule: LearningRateSchedule
    data: SessionData
    host_reader: HostReader
    metrics: RunMetrics = field(default_factory=RunMetrics)
    iteration: int = 0
    num_micro_batches: int = 0
    num_step_host_reads: int = 0
    unsettled: UnsettledStep | None = None
    reruns: list[Rerun] = field(default_factory=list)
    provenance: dict[str, str] = field(default_factory=dict)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    @property
    def start(self) -> StepStart:
        """Where the next step begins."""
        return StepStart(self.iteration, self.data.loader.position, self.num_micro_batches)

    def beat(self, phase: str) -> None:
        """Note that a phase of the next step begins, or something behind the newest one."""
        self.heartbeat.beat(phase, self.iteration + 1)

    def rewind(self, start: StepStart) -> None:
        """Drop gradients and go back to where a step began that has updated nothing."""
        self.optimizer.zero_grad()
        self.iteration, self.num_micro_batches = start.iteration, start.num_micro_batches
        self.data.loader.rewind(start.data_position)
        self.built.activation.repeat_step()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Keep what happens inside out of the counters of training (of the cache, and host reads)."""
        reader = self.host_reader
        before = reader.count
        try:
            with self.built.metadata_cache.manager.statistics.uncounted():
                yield
        finally:
            reader.count = before

    def training_state(self) -> TrainingState:
        """What a checkpoint holds, and where loading one puts it (see :meth:`adopt`)."""
        assert self.unsettled is None, "settle_step() before saving: the newest step may have to be run again"
        return TrainingState(
            model=self.engine.module,
            optimizer=self.optimizer,
            config=self.config,
            counters=self.metrics.state_dict(),
            data_position=self.data.loader.state_dict(),
            provenance=self.provenance,
            decisions={"offload": self.built.activation.state_dict()},
            after_load=self.engine.after_load,
        )

    def adopt(self, loaded: LoadedCheckpoint) -> None:
        """Continue from a loaded checkpoint: weights and moments are in place already, counters, position and what was
        decided by measuring follow. Every rank calls it."""
        self.iteration = loaded.step
        self.metrics.load_state_dict(loaded.counters)
        self.data.loader.load_state_dict(loaded.data_position)
        self.built.activation.load_state_dict(loaded.decisions.get("offload", {}))

    def close(self) -> None:
        """End threads and free what lies off the device."""
        self.data.loader.close()
        self.built.activation.close()


def build_session(
    config: RunConfig,
    mesh: ParallelMesh,
    device: torch.device,
    offload_dir: Path | None,
    data: SessionData | None = None,
) -> Session:
    """Build all parts of a run, in order: data, model, engine, optimizer, executor.

    Args:
        config: A validated configuration.
        mesh: The run's mesh; every rank must call this.
        device: Where this rank computes.
        offload_dir: Folder of the activation disk tier, used only on machines without an accelerator.
        data: What it trains on; unset: what the configuration names.

    Returns:
        A session at iteration 0.

    Raises:
        ConfigError: If data, kernels or folders cannot be had.
        PeerFailedError: If that happened on another rank.
    """
    host_reader = HostReader()
    data = data or _build_data(config, mesh, device)
    place = BuildPlace(mesh, device, host_reader, offload_dir)
    built = together(lambda: build_model(config, data.tokenizer.vocab_size, place), mesh.world_group)
    data.loader.prepare_with(built.metadata_cache.prepare)
    engine = parallelize(built, mesh, config.parallel, DeepSpeedRun.from_config(config, mesh, built.precision))
    differing = differing_replicas(engine.module, mesh)
    assert not differing, f"parameters differ between ranks before the first step: {differing[:3]}"
    named_parameters = engine.module.named_parameters()
    optimizer = engine.attach_optimizer(
        build_optimizer(named_parameters, config.optimizer, built.backends.optimizer, device, host_reader=host_reader)
    )
    session = Session(
        config=config,
        mesh=mesh,
        device=device,
        built=built,
        engine=engine,
        executor=build_executor(config, built, engine, device),
        optimizer=optimizer,
        schedule=LearningRateSchedule(config.optimizer, config.training.train_iters),
        data=data,
        host_reader=host_reader,
    )
    if config.logging.nvtx_ranges:
        name_phases(built, data.loader, engine, optimizer, device)
    return session


def _build_data(config: RunConfig, mesh: ParallelMesh, device: torch.device) -> SessionData:
    training, data_config = config.training, config.data
    tokenizer = build_tokenizer(data_config)
    train, heldout = together(lambda: build_datasets(data_config, tokenizer, training.seed), mesh.world_group)
    if not is_same_on_all_ranks(int(train.fingerprint[:15], 16), mesh.world_group):
        raise ConfigError(
            "--data-path",
            " ".join(data_config.data_path) or "the embedded corpus",
            "is not the same on all ranks",
            "give every machine the same files (for the embedded corpus: the same Python version)",
        )
    # Pipeline and tensor-parallel ranks see the same data, context-parallel ranks cut theirs out of the same packs.
    plan = BatchPlan(
        training.micro_batch_size, training.global_batch_size, mesh.dp_rank, mesh.dp_size, mesh.cp_rank, mesh.cp_size
    )
    stream = PackStream(
        train, data_config.seq_length, data_config.packing_window, training.seed, data_config.segment_alignment
    )
    return SessionData(
        tokenizer=tokenizer,
        train=train,
        heldout=heldout,
        loader=BatchLoader(stream, plan, device=device),
        eval_plan=EvalPlan.build(stream, plan, training.eval_iters),
    )
