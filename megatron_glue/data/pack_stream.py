"""The one global, endless stream of packs, and how packs become a micro-batch.

The stream is the same for every rank and layout: ranks take from it by index, so the same packs make the same
optimizer step however many ranks share it. One epoch follows the other without a gap; a position is two integers and
is found again by planning that one epoch anew. It starts no thread and knows no device.

Shape suffixes: T tokens of the micro-batch, S its live segments.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.data.documents import DocumentSet
from megatron_glue.data.packing import EpochPlan, PackingRule, plan_epoch
from megatron_glue.types.packed_batch import IGNORE_LABEL, PackedBatch
from megatron_glue.types.packed_sequence import PackedSequence

_KEPT_PLANS = 2  # the epoch being consumed and the one being prefetched


@dataclass(frozen=True)
class StreamPosition:
    """The next pack to take.

    Attributes:
        epoch: Its epoch, counted from 0.
        pack: Its index in the epoch, always one that exists: the end of an epoch is the start of the next.
        num_packs_taken: Packs taken since the start of epoch 0, which is its index in the global stream.
    """

    epoch: int = 0
    pack: int = 0
    num_packs_taken: int = 0


@dataclass(frozen=True, eq=False)
class PackReference:
    """One pack of the stream.

    Attributes:
        plan: Plan of its epoch.
        pack: Its index in the epoch.
        stream_index: Its index in the global stream.
    """

    plan: EpochPlan
    pack: int
    stream_index: int

    @property
    def num_label_tokens(self) -> int:
        """Labels of this pack."""
        return int(self.plan.label_tokens_P[self.pack])

    @property
    def num_tokens(self) -> int:
        """Tokens of this pack, without padding: its labels and one per segment."""
        segments = self.plan.segments_of(self.pack)
        return self.num_label_tokens + segments.stop - segments.start

    @property
    def segment_lengths(self) -> np.ndarray:
        """Tokens of each segment of this pack: int64."""
        return self.plan.segment_lengths_S[self.plan.segments_of(self.pack)]


class PackStream:
    """The global stream of packs of a document set.

    Args:
        documents: What to pack.
        seq_length: Tokens per pack.
        window: Documents packed together.
        seed: The run's seed; with the epoch it decides the order.
        alignment: Segments cost their length rounded up to this; off: 1.

    Raises:
        ConfigError: If there are no documents or the length, window or alignment is out of range.
    """

    def __init__(self, documents: DocumentSet, seq_length: int, window: int, seed: int, alignment: int = 1) -> None:
        if documents.num_documents == 0:
            raise ConfigError("--data-path", "(no documents)", "there is nothing to pack", "give documents with text")
        self.documents = documents
        self.rule = PackingRule(seq_length, window, seed, alignment)
        self._plans: dict[int, EpochPlan] = {}
        self._lock = threading.Lock()

    @property
    def seq_length(self) -> int:
        """Tokens per pack."""
        return self.rule.seq_length

    def plan(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch; the latest two are kept. May be called from several threads."""
        with self._lock:
            if epoch not in self._plans:
                self._plans[epoch] = plan_epoch(self.documents, self.rule, epoch)
                while len(self._plans) > _KEPT_PLANS:
                    del self._plans[next(iter(self._plans))]
            return self._plans[epoch]

    def take(self, position: StreamPosition, count: int) -> tuple[list[PackReference], StreamPosition]:
        """Return the next packs, rolling over into as many epochs as that needs.

        Args:
            position: Where to start.
            count: Packs to take.

        Returns:
            The packs in order, and the position after them.
        """
        epoch, pack = position.epoch, position.pack
        references = []
        for index in range(position.num_packs_taken, position.num_packs_taken + count):
            plan = self.plan(epoch)
            references.append(PackReference(plan, pack, index))
            epoch, pack = (epoch, pack + 1) if pack + 1 < plan.num_packs else (epoch + 1, 0)
        return references, StreamPosition(epoch, pack, position.num_packs_taken + count)

    def identity(self) -> dict[str, int | str]:
        """Return what decides the stream, as plain values: a position is only worth something with the same."""
        return {
            "seq_length": self.rule.seq_length,
            "packing_window": self.rule.window,
            "segment_alignment": self.rule.alignment,
            "seed": self.rule.seed,
            "documents": self.documents.fingerprint,
        }


def assemble_batch(documents: DocumentSet, packs: Sequence[PackReference], num_tokens: int) -> PackedBatch:
    """Make one micro-batch of packs: live segments first, all padding behind them as one dead segment.

    Args:
        documents: Where the tokens are.
        packs: The packs, side by side in this order; none gives a batch of padding only, with no label.
        num_tokens: Tokens of the batch, padding included.

    Returns:
        A batch on the CPU. Its tensors are fresh: writing to them changes nothing else.
    """
    slices = [(reference.plan, reference.plan.segments_of(reference.pack)) for reference in packs]
    empty = np.empty(0, dtype=np.int64)
    starts_S = np.concatenate([empty, *(plan.segment_starts_S[where] for plan, where in slices)])
    lengths_S = np.concatenate([empty, *(plan.segment_lengths_S[where] for plan, where in slices)])
    ends_S = np.cumsum(lengths_S)
    num_valid = int(ends_S[-1]) if len(ends_S) else 0
    assert num_valid <= num_tokens, f"{num_valid} tokens do not fit into {num_tokens}"

    source_T = np.arange(num_valid, dtype=np.int64) + np.repeat(starts_S - (ends_S - lengths_S), lengths_S)
    input_ids_T = np.full(num_tokens, documents.pad_id, dtype=np.int64)
    input_ids_T[:num_valid] = documents.tokens[source_T]
    # The last token of a segment has no next token; what follows it belongs to another document or chunk.
    labels_T = np.full(num_tokens, IGNORE_LABEL, dtype=np.int64)
    labels_T[: max(num_valid - 1, 0)] = input_ids_T[1:num_valid]
    labels_T[ends_S - 1] = IGNORE_LABEL
    return PackedBatch(
        input_ids_T=torch.from_numpy(input_ids_T),
        labels_T=torch.from_numpy(labels_T),
        sequence=PackedSequence.from_lengths(lengths_S.tolist(), num_pad_tokens=num_tokens - num_valid),
        num_label_tokens=num_valid - len(lengths_S),
        pack_ids=tuple(reference.stream_index for reference in packs),
    )
