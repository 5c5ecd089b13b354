"""Hands each rank its micro-batches of every optimizer step, one step ahead, and knows its exact position.

Stands between the global stream of packs and the training step. A rank builds only its own micro-batches, but knows
the plan of the whole step: how many labels all ranks have together is a host integer here, so the loss is normalised
without a collective and without reading a device. Under context parallelism a rank cuts its rows out of whole
micro-batches. Position means consumed: what was prefetched and not handed out is built again after a resume. It does
not evaluate; ``heldout.py`` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_glue.config.errors import ConfigError
from megatron_glue.data.context_shard import shard_batch
from megatron_glue.data.pack_stream import PackStream, StreamPosition, assemble_batch
from megatron_glue.types.packed_batch import PackedBatch
from megatron_glue.types.packed_sequence import PackedSequence


@dataclass(frozen=True)
class BatchPlan:
    """How the packs of one optimizer step are dealt to ranks.

    Pack p of the step stands in global micro-batch p // micro_batch_size; global micro-batch g is micro-batch
    g // dp_size of rank g % dp_size. All ranks have the same number of micro-batches.

    Attributes:
        micro_batch_size: Packs per micro-batch.
        global_batch_size: Packs per optimizer step over all ranks.
        dp_rank: This rank's index among the data-parallel ranks.
        dp_size: Number of data-parallel ranks.
        cp_rank: This rank's index among the context-parallel ranks, which share the same packs.
        cp_size: Number of context-parallel ranks; off: 1.
    """

    micro_batch_size: int
    global_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.cp_rank < self.cp_size:
            raise ValueError(f"cp_rank={self.cp_rank}: must lie between 0 and cp_size={self.cp_size}")
        if not 0 <= self.dp_rank < self.dp_size:
            raise ValueError(f"dp_rank={self.dp_rank}: must lie between 0 and dp_size={self.dp_size}")
        per_round = self.micro_batch_size * self.dp_size
        if self.micro_batch_size < 1 or self.global_batch_size < 1 or self.global_batch_size % per_round:
            raise ConfigError(
                "--global-batch-size",
                self.global_batch_size,
                f"is not a positive multiple of micro batch size {self.micro_batch_size} x data-parallel size "
                f"{self.dp_size}",
                f"use a multiple of {max(per_round, 1)}",
            )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step of each rank."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def packs_of(self, micro_batch: int) -> slice:
        """Return which of the step's packs stand in this rank's micro-batch of that number."""
        begin = (micro_batch * self.dp_size + self.dp_rank) * self.micro_batch_size
        return slice(begin, begin + self.micro_batch_size)


@dataclass(frozen=True, eq=False)
class _Step:
    """One optimizer step as the worker built it; ``copied`` is recorded once all its tensors are on the device.

    ``prepared`` are tensors that were derived from the batches there.
    """

    batches: list[PackedBatch]
    num_label_tokens: int
    num_valid_tokens: int
    segment_lengths: np.ndarray
    end: StreamPosition
    prepared: list[Tensor]
    copied: torch.cuda.Event | None


class BatchLoader:
    """Iterates over optimizer steps.

    Args:
        stream: The global stream of packs.
        plan: How packs are dealt to ranks.
        device: Where the batches go.
        prefetch: Build the next step in a thread while the current one computes.

    Attributes:
        waited_s: Time that callers of :meth:`next_step` have waited for batches. On a GPU their copies go on behind it.
    """

    def __init__(
        self, stream: PackStream, plan: BatchPlan, *, device: torch.device | str = "cpu", prefetch: bool = True
    ) -> None:
        self._stream = stream
        self._plan = plan
        self._device = torch.device(device)
        self._copy_stream = None
        if self._device.type == "cuda":
            # The current device belongs to a thread: pin it down here, where it is the caller's.
            self._device = torch.empty(0, device=self._device).device
            self._copy_stream = torch.cuda.Stream(self._device)
        self._worker = _start_worker(self._device) if prefetch else None
        self._pending: Future[_Step] | None = None
        self._position = StreamPosition()
        self._current: _Step | None = None
        self._closed = False
        self.waited_s = 0.0
        self._prepare: Callable[[PackedSequence], list[Tensor]] = lambda _sequence: []

    def prepare_with(self, prepare: Callable[[PackedSequence], list[Tensor]]) -> None:
        """Let something be derived from each micro-batch beside the step before it, in the prefetching thread.

        Args:
            prepare: Gets the layout of a micro-batch on the device and keeps what it makes; it returns the tensors that
                it made. Without prefetch it is called when the step is handed out.
        """
        self._prepare = prepare

    @property
    def position(self) -> StreamPosition:
        """The first pack that no step has consumed."""
        return self._position

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step of each rank."""
        return self._plan.num_micro_batches

    @property
    def step_label_tokens(self) -> int:
        """Labels in the step handed out last, over all ranks and micro-batches; 0 before the first."""
        return self._current.num_label_tokens if self._current else 0

    @property
    def step_valid_tokens(self) -> int:
        """Tokens that are not padding in the step handed out last, over all ranks and micro-batches."""
        return self._current.num_valid_tokens if self._current else 0

    @property
    def step_segment_lengths(self) -> np.ndarray:
        """Lengths of the segments in the step handed out last, over all ranks: int64, in tokens."""
        return self._current.segment_lengths if self._current else np.empty(0, dtype=np.int64)

    @property
    def epoch_segment_lengths(self) -> np.ndarray:
        """Lengths of all segments in the epoch of the current position: int64, in tokens."""
        return self._stream.plan(self._position.epoch).segment_lengths_S

    @property
    def step_places(self) -> int:
        """Places of a step's packs over all ranks, those that padding takes included, in tokens."""
        return self._plan.global_batch_size * self._stream.seq_length

    @property
    def packing_efficiency(self) -> float:
        """Share of places that hold a token in the epoch of the current position, 0 to 1."""
        return self._stream.plan(self._position.epoch).efficiency

    def next_step(self) -> list[PackedBatch]:
        """Return this rank's micro-batches of the next optimizer step, on the device.

        Returns:
            ``num_micro_batches`` batches of ``micro_batch_size * seq_length / cp_size`` tokens each.

        Raises:
            Exception: Whatever building the step raised, in the prefetching thread too. The position stays.
            ValueError: After :meth:`close`.
        """
        if self._closed:
            raise ValueError("the loader is closed")
        start = time.perf_counter()
        pending, self._pending = self._pending, None
        step = pending.result() if pending else self._build(self._position)
        self.waited_s += time.perf_counter() - start
        if step.copied is not None:
            self._hand_over(step)
        self._position, self._current = step.end, step
        if self._worker:
            self._pending = self._worker.submit(self._build, step.end)
        return step.batches

    def skip(self, num_steps: int) -> None:
        """Go on by a number of steps without building their batches."""
        self._discard_pending()
        _, self._position = self._stream.take(self._position, num_steps * self._plan.global_batch_size)
        self._current = None

    def rewind(self, position: StreamPosition) -> None:
        """Go back to where a step began, so that :meth:`next_step` hands out the same step again.

        Args:
            position: What :attr:`position` was before that step.
        """
        self._discard_pending()
        self._position, self._current = position, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it refers to, as plain JSON values. A prefetched step does not count."""
        position = self._position
        return {
            "epoch": position.epoch,
            "pack": position.pack,
            "num_packs_taken": position.num_packs_taken,
            "stream": self._stream.identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Ranks and batch sizes may differ from when it was saved.

        Raises:
            ConfigError: If the position belongs to other documents, another seed, length, window or alignment.
        """
        # Positions saved before there was an alignment are those of none.
        of_position = {"segment_alignment": 1} | state["stream"]
        for name, now in self._stream.identity().items():
            saved = of_position[name]
            if saved != now:
                raise ConfigError(
                    "--data-path" if name == "documents" else f"--{name.replace('_', '-')}",
                    now,
                    f"the checkpoint's position in the data was saved with {name} {saved}",
                    "resume with the same data and settings, or start a new run with another --save",
                )
        position = StreamPosition(int(state["epoch"]), int(state["pack"]), int(state["num_packs_taken"]))
        num_packs = self._stream.plan(position.epoch).num_packs
        if not 0 <= position.pack < num_packs:
            raise ValueError(f"pack={position.pack}: epoch {position.epoch} has {num_packs} packs")
        self._discard_pending()
        self._position, self._current = position, None

    def close(self) -> None:
        """End the prefetching thread; harmless when called again."""
        self._closed = True
        self._discard_pending()
        if self._worker:
            self._worker.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _discard_pending(self) -> None:
        if self._pending and not self._pending.cancel():
            self._pending.exception()  # waits; an error in a step nobody will get concerns nobody
        self._pending = None

    def _build(self, position: StreamPosition) -> _Step:
        plan, documents = self._plan, self._stream.documents
        packs, end = self._stream.take(position, plan.global_batch_size)
        num_tokens = plan.micro_batch_size * self._stream.seq_length
        batches = [
            shard_batch(
                assemble_batch(documents, packs[plan.packs_of(index)], num_tokens),
                plan.cp_rank,
                plan.cp_size,
                self._stream.rule.alignment,
            )
            for index in range(plan.num_micro_batches)
        ]
        copied = None
        if self._copy_stream is None:
            prepared = self._prepare_all(batches)
        else:
            with torch.cuda.stream(self._copy_stream):
                # Page-locked memory is what makes a copy to the device asynchronous.
                pinned = [batch.map_tensors(torch.Tensor.pin_memory) for batch in batches]
                batches = [batch.to(self._device, non_blocking=True) for batch in pinned]
                prepared = self._prepare_all(batches)
                copied = torch.cuda.Event()
                copied.record(self._copy_stream)
        return _Step(
            batches=batches,
            num_label_tokens=sum(pack.num_label_tokens for pack in packs),
            num_valid_tokens=sum(pack.num_tokens for pack in packs),
            segment_lengths=np.concatenate([pack.segment_lengths for pack in packs]),
            end=end,
            prepared=prepared,
            copied=copied,
        )

    def _prepare_all(self, batches: list[PackedBatch]) -> list[Tensor]:
        return [tensor for batch in batches for tensor in self._prepare(batch.sequence)]

    def _hand_over(self, step: _Step) -> None:
        """Let the computing stream wait for the copies, and keep their memory until it has used them."""
        assert step.copied is not None
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(step.copied)
        for tensor in (*(tensor for batch in step.batches for tensor in batch.tensors), *step.prepared):
            tensor.record_stream(computing)


def _start_worker(device: torch.device) -> ThreadPoolExecutor:
    """One thread for the next step. On CUDA it begins on its rank's device: a new thread's device is the first one,
    and pinning memory there would open a context on a GPU that belongs to another rank."""
    name = "batch-prefetch"
    if device.type != "cuda":
        return ThreadPoolExecutor(1, thread_name_prefix=name)
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=torch.cuda.set_device, initargs=(device,))
