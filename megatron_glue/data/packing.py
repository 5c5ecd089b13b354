"""Which pieces of which documents stand in which pack, for one epoch. Lengths in, indices out; no token is touched.

A pack is a row of ``seq_length`` tokens. Documents are shuffled, cut and packed whole where they fit, so that almost no
token of a batch is padding and no document sees another. Everything is known on the host before the first step, so
every rank knows every pack of the step, and how many labels it has, without asking anyone.

- A document longer than a pack is cut into chunks of ``seq_length`` tokens and a remainder. Each piece is a segment of
  its own: its positions start at 0, and its last token has no label (the document's next token stands in another
  pack). That loses one label in ``seq_length``.
- Context parallelism cuts every segment into equal pieces, so with an alignment above 1 a segment costs its length
  rounded up to that. Only its price is rounded: a row holds real tokens back to back, and what alignment costs stands
  in the padding at the tail.
- Pieces are packed by first-fit-decreasing (Johnson, "Near-optimal bin packing algorithms", MIT 1973; for token packs:
  Krell et al., "Efficient sequence packing without cross-contamination", arXiv:2107.02027) within a window of
  documents. Packs with room are kept open for the next windows, a bounded number of them.
- The order of packs is shuffled, since decreasing lengths would otherwise sort the epoch.

Shape suffixes: M documents, S segments of the epoch, P packs of the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_glue.config.errors import ConfigError
from megatron_glue.data.documents import DocumentSet

# A pack with less room than 1/64 is closed: hardly a piece would fit, and every open pack costs a comparison.
_CLOSED_SHARE = 64


@dataclass(frozen=True)
class PackingRule:
    """How documents become packs.

    Attributes:
        seq_length: Tokens per pack, at least 2.
        window: Documents that first-fit-decreasing looks at together; also the most packs kept open.
        seed: The run's seed.
        alignment: Tokens that the price of a segment is rounded up to a multiple of, a divisor of ``seq_length``; off:
            1. Packs depend on it, and not on how many ranks a segment is then cut for.
    """

    seq_length: int
    window: int
    seed: int
    alignment: int = 1

    def __post_init__(self) -> None:
        if self.seq_length < 2:
            raise ConfigError(
                "--seq-length", self.seq_length, "a pack of one token has no next token to learn", "use at least 2"
            )
        if self.window < 1:
            raise ConfigError("--packing-window", self.window, "must be positive", "use 256")
        if self.alignment < 1:
            raise ConfigError("--segment-alignment", self.alignment, "must be positive", "use 1 to turn it off")
        if self.seq_length % self.alignment:
            raise ConfigError(
                "--segment-alignment",
                self.alignment,
                f"does not divide --seq-length {self.seq_length}, so a document of that length would fit into no pack",
                "use a divisor",
            )

    def places_of(self, lengths: np.ndarray) -> np.ndarray:
        """Return the places of a pack that segments cost: their lengths rounded up to the alignment."""
        return -(-lengths // self.alignment) * self.alignment


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """All packs of one epoch. Its arrays are made read-only.

    Attributes:
        epoch: Counted from 0.
        seq_length: Tokens per pack.
        segment_starts_S: int64. First token of each segment in the documents' flat array, in the order of packs.
        segment_lengths_S: int64. Tokens of each segment, between 1 and ``seq_length``.
        pack_offsets: int64 [P + 1]. Segments of pack p are those from ``pack_offsets[p]`` to ``pack_offsets[p + 1]``.
        label_tokens_P: int64. Labels of each pack: its tokens less one per segment.
    """

    epoch: int
    seq_length: int
    segment_starts_S: np.ndarray
    segment_lengths_S: np.ndarray
    pack_offsets: np.ndarray
    label_tokens_P: np.ndarray

    def __post_init__(self) -> None:
        for values in (self.segment_starts_S, self.segment_lengths_S, self.pack_offsets, self.label_tokens_P):
            assert values.dtype == np.int64, values.dtype
            values.flags.writeable = False

    @property
    def num_packs(self) -> int:
        """Packs of this epoch."""
        return len(self.pack_offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments: every token of the documents once."""
        return int(self.segment_lengths_S.sum())

    @property
    def efficiency(self) -> float:
        """Share of the packs' places that hold a token, 0 to 1; what alignment costs is in it."""
        return self.num_tokens / (self.num_packs * self.seq_length)

    def segments_of(self, pack: int) -> slice:
        """Return where the segments of one pack stand in the arrays of segments."""
        return slice(int(self.pack_offsets[pack]), int(self.pack_offsets[pack + 1]))


def plan_epoch(documents: DocumentSet, rule: PackingRule, epoch: int) -> EpochPlan:
    """Plan one epoch: every token of every document in exactly one pack.

    Args:
        documents: At least one document. Only starts and lengths are read.
        rule: Length, window and seed.
        epoch: Counted from 0. With the seed it decides the order; no other random state is used or touched.

    Returns:
        The plan, the same on every rank and machine.
    """
    bits = np.random.PCG64(np.random.SeedSequence([rule.seed, epoch]))
    order_M = _shuffled(documents.num_documents, bits)
    starts_M, lengths_M = documents.starts[order_M], documents.lengths[order_M]
    num_full_M, remainders_M = np.divmod(lengths_M, rule.seq_length)

    # Chunks that fill a pack by themselves need no search.
    first_full_M = np.cumsum(num_full_M) - num_full_M
    chunk_index = np.arange(int(num_full_M.sum()), dtype=np.int64) - np.repeat(first_full_M, num_full_M)
    full_starts = np.repeat(starts_M, num_full_M) + chunk_index * rule.seq_length
    has_rest = remainders_M > 0
    rest_lengths = remainders_M[has_rest]
    rest_starts = (starts_M + num_full_M * rule.seq_length)[has_rest]
    rest_places = rule.places_of(rest_lengths)
    rest_packs, num_rest_packs = pack_first_fit_decreasing(rest_places, rule.seq_length, rule.window)

    num_packs = num_rest_packs + len(full_starts)
    pack_S = np.concatenate([rest_packs, num_rest_packs + np.arange(len(full_starts), dtype=np.int64)])
    new_index_P = np.empty(num_packs, dtype=np.int64)
    new_index_P[_shuffled(num_packs, bits)] = np.arange(num_packs)
    pack_S = new_index_P[pack_S]
    order_S = np.argsort(pack_S, kind="stable")
    segment_lengths_S = np.concatenate([rest_lengths, np.full(len(full_starts), rule.seq_length, np.int64)])[order_S]
    pack_offsets = np.concatenate([[0], np.cumsum(np.bincount(pack_S, minlength=num_packs))]).astype(np.int64)
    return EpochPlan(
        epoch=epoch,
        seq_length=rule.seq_length,
        segment_starts_S=np.concatenate([rest_starts, full_starts])[order_S],
        segment_lengths_S=segment_lengths_S,
        pack_offsets=pack_offsets,
        label_tokens_P=np.add.reduceat(segment_lengths_S - 1, pack_offsets[:-1]),
    )


def pack_first_fit_decreasing(lengths: np.ndarray, capacity: int, window: int) -> tuple[np.ndarray, int]:
    """Assign pieces to packs: per window of pieces, longest first, each into the first open pack with room.

    Args:
        lengths: int64. Places that each piece costs, 1 to ``capacity``, in the order of the epoch.
        capacity: Places per pack.
        window: Pieces sorted together; also the most packs that stay open from one window to the next. Of more, the
            fullest are closed.

    Returns:
        int64 pack of each piece, and the number of packs. No pack is empty.
    """
    pack_of_piece = np.empty(len(lengths), dtype=np.int64)
    room = np.empty(2 * window, dtype=np.int64)  # of the open packs, oldest first
    pack_ids = np.empty(2 * window, dtype=np.int64)
    num_open, num_packs = 0, 0
    for begin in range(0, len(lengths), window):
        lengths_window = lengths[begin : begin + window]
        for piece in np.argsort(-lengths_window, kind="stable").tolist():
            length = lengths_window[piece]
            fits = room[:num_open] >= length
            slot = int(fits.argmax()) if num_open else 0
            if num_open == 0 or not fits[slot]:
                slot, num_open = num_open, num_open + 1
                room[slot], pack_ids[slot] = capacity, num_packs
                num_packs += 1
            room[slot] -= length
            pack_of_piece[begin + piece] = pack_ids[slot]
        kept = np.flatnonzero(room[:num_open] > capacity // _CLOSED_SHARE)
        if len(kept) > window:
            kept = np.sort(kept[np.argsort(-room[kept], kind="stable")[:window]])
        num_open = len(kept)
        room[:num_open], pack_ids[:num_open] = room[kept], pack_ids[kept]
    return pack_of_piece, num_packs


def _shuffled(count: int, bits: np.random.PCG64) -> np.ndarray:
    """Return 0..count-1 in random order.

    Sorting raw bits instead of ``Generator.permutation``: NumPy keeps raw streams fixed between versions, but not the
    methods of Generator, and a resumed run must find the same order.
    """
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64)
