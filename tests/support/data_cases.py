"""Small document sets for tests: every token says which document it is from, so that a leak shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_glue.data.documents import DocumentSet
from megatron_glue.data.pack_stream import PackStream
from megatron_glue.types.packed_batch import PackedBatch

VOCAB_SIZE = 60_000


def documents_of_lengths(lengths: Sequence[int]) -> DocumentSet:
    """Documents whose tokens are 1, 2, 3, ... through the whole set (modulo the vocabulary); 0 is the pad id."""
    lengths_array = np.array(lengths, dtype=np.int64)
    starts = np.cumsum(lengths_array) - lengths_array
    tokens = (np.arange(int(lengths_array.sum())) % (VOCAB_SIZE - 1) + 1).astype(np.uint16)
    return DocumentSet(tokens=tokens, starts=starts, lengths=lengths_array, vocab_size=VOCAB_SIZE, pad_id=0)


def skewed_lengths(count: int, seed: int = 0, largest: int = 5000) -> list[int]:
    """Document lengths as real text has them: mostly short, a few very long."""
    values = np.random.Generator(np.random.PCG64(seed)).lognormal(4.0, 1.2, count)
    return np.clip(values, 1, largest).astype(int).tolist()


def stream_of_lengths(
    lengths: Sequence[int], seq_length: int = 16, window: int = 8, seed: int = 1, *, alignment: int = 1
) -> PackStream:
    """Stream over :func:`documents_of_lengths`."""
    return PackStream(documents_of_lengths(lengths), seq_length, window, seed, alignment)


def segments(batch: PackedBatch) -> list[tuple[list[int], list[int]]]:
    """Return (ids, labels) of each live segment."""
    result, begin = [], 0
    for length in batch.sequence.lengths:
        result.append(
            (batch.input_ids_T[begin : begin + length].tolist(), batch.labels_T[begin : begin + length].tolist())
        )
        begin += length
    return result
