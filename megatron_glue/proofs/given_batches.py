"""A session that trains on batches from outside instead of documents: for benchmarks beside other frameworks.

Model, engine, optimizer and step are those of any run. What needs documents (evaluation, sampling, saving a position in
the data) is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_glue.config.sections import RunConfig
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.session import Session, SessionData, build_session
from megatron_glue.types import PackedBatch, PackedSequence


@dataclass(frozen=True)
class NumberTokenizer:
    """Ids that stand for nothing.

    Attributes:
        vocab_size: Number of ids.
    """

    vocab_size: int


class GivenBatches:
    """Stands in for the loader: one micro-batch per step and rank.

    Args:
        batches: This rank's micro-batches, one after another.
        num_ranks: Data-parallel ranks, all with as many tokens and labels in a step as this one.
    """

    def __init__(self, batches: Iterator[PackedBatch], num_ranks: int) -> None:
        self._batches = batches
        self._num_ranks = num_ranks
        self._prepare: Callable[[PackedSequence], list[Tensor]] = lambda _sequence: []
        self.step_label_tokens = 0
        self.step_valid_tokens = 0

    def prepare_with(self, prepare: Callable[[PackedSequence], list[Tensor]]) -> None:
        """See :meth:`megatron_glue.data.loader.BatchLoader.prepare_with`; called when the step is handed out."""
        self._prepare = prepare

    def next_step(self) -> list[PackedBatch]:
        """Return the next micro-batch."""
        batch = next(self._batches)
        self._prepare(batch.sequence)
        self.step_label_tokens = batch.num_label_tokens * self._num_ranks
        self.step_valid_tokens = batch.sequence.num_valid_tokens * self._num_ranks
        return [batch]

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True, eq=False)
class GivenData:
    """Batches and the size of their vocabulary.

    Attributes:
        vocab_size: Real entries of the vocabulary.
        batches: This rank's micro-batches.
    """

    vocab_size: int
    batches: Iterator[PackedBatch]


def session_over_batches(
    config: RunConfig, mesh: ParallelMesh, device: torch.device, data: GivenData, offload_dir: Path | None = None
) -> Session:
    """Build a session over given batches.

    Args:
        config: A validated configuration; its data section is not looked at.
        mesh: The run's mesh; every rank must call this.
        device: Where this rank computes, and where the batches are.
        data: What it trains on.
        offload_dir: Folder of the activation disk tier.

    Returns:
        A session at iteration 0.
    """
    tokenizer: Any = NumberTokenizer(data.vocab_size)
    loader: Any = GivenBatches(data.batches, mesh.dp_size)
    nothing: Any = None
    return build_session(config, mesh, device, offload_dir, SessionData(tokenizer, nothing, nothing, loader, nothing))
