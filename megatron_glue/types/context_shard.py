"""Which tokens of a packed micro-batch each context-parallel rank holds. Host integers only.

Every segment is cut into 2 x size pieces of equal padded length; rank r holds pieces r and 2 x size - 1 - r. A causal
query costs as much as the tokens before it, so an early and a late piece together cost about the same on every rank
(the order of Megatron-LM; "The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.2).

Padding is only counted, never stored inside a row: pieces hold the real tokens that fall into their places, so the last
pieces of a segment may be shorter, or empty. A rank's row holds, segment by segment, its early and then its late piece,
and its share of the micro-batch's padding at the tail.

Shape suffixes: S segments of the micro-batch, T tokens of one rank's row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class ContextShard:
    """The cut of one micro-batch, and which part of it this rank holds.

    Attributes:
        rank: This rank among the context-parallel ranks.
        size: Number of these ranks, at least 2.
        alignment: Places of a segment are rounded up to a multiple of this; itself a multiple of 2 x size.
        lengths: Tokens of each WHOLE segment, each at least 1.
        num_tokens: Tokens of the whole micro-batch, padding included; a multiple of size.
    """

    rank: int
    size: int
    alignment: int
    lengths: tuple[int, ...]
    num_tokens: int

    def __post_init__(self) -> None:
        if not (self.size > 1 and 0 <= self.rank < self.size):
            raise ValueError(f"rank={self.rank}, size={self.size}: a cut needs at least 2 ranks, counted from 0")
        if self.alignment % (2 * self.size):
            raise ValueError(f"alignment={self.alignment}: must be a multiple of 2 x {self.size} ranks")
        if self.num_tokens % self.size:
            raise ValueError(f"num_tokens={self.num_tokens}: must be a multiple of {self.size} ranks")
        num_places = sum(-(-length // self.alignment) * self.alignment for length in self.lengths)
        if num_places > self.num_tokens:
            raise ValueError(
                f"segments rounded up to {self.alignment} tokens need {num_places} places, the micro-batch has "
                f"{self.num_tokens}: pack it with that alignment"
            )

    @property
    def num_local_tokens(self) -> int:
        """Rows of every rank, padding included."""
        return self.num_tokens // self.size

    @cached_property
    def first_tokens_S(self) -> np.ndarray:
        """int64. Index in the micro-batch of each segment's first token."""
        lengths_S = np.array(self.lengths, dtype=np.int64)
        return np.cumsum(lengths_S) - lengths_S

    @cached_property
    def num_valid_tokens_of_ranks(self) -> tuple[int, ...]:
        """Real tokens that each rank holds."""
        return tuple(int(np.diff(self.pieces_of(rank)).sum()) for rank in range(self.size))

    @cached_property
    def local_lengths(self) -> tuple[int, ...]:
        """Tokens of each segment that this rank holds; may be 0."""
        return tuple(np.diff(self.pieces_of(self.rank)).sum(axis=(1, 2)).tolist())

    def pieces_of(self, rank: int) -> np.ndarray:
        """Return the real tokens of a rank's pieces.

        Args:
            rank: Any of the context-parallel ranks.

        Returns:
            int64 [S, 2, 2]: for each segment and its early and late piece the first token, counted from the
            segment's start, and the one behind the last.
        """
        lengths_S = np.array(self.lengths, dtype=np.int64)
        piece_lengths_S = -(-lengths_S // self.alignment) * (self.alignment // (2 * self.size))
        edges = np.array([[rank, rank + 1], [2 * self.size - 1 - rank, 2 * self.size - rank]], dtype=np.int64)
        return np.minimum(edges * piece_lengths_S[:, None, None], lengths_S[:, None, None])

    def token_ids_of(self, rank: int) -> np.ndarray:
        """Return which token of the whole micro-batch stands in each row of a rank.

        Args:
            rank: Any of the context-parallel ranks.

        Returns:
            int64 [T]: real tokens in the order of segments and pieces, then this rank's share of the padding. All
            ranks together hold every token of the micro-batch once.
        """
        tokens = (self.pieces_of(rank) + self.first_tokens_S[:, None, None]).reshape(-1, 2)
        counts = tokens[:, 1] - tokens[:, 0]
        num_valid = self.num_valid_tokens_of_ranks
        first_rows = np.cumsum(counts) - counts
        valid_ids = np.arange(num_valid[rank], dtype=np.int64) + np.repeat(tokens[:, 0] - first_rows, counts)
        # Every rank has the same number of rows, so what one lacks in real tokens it gets as padding.
        first_pad = sum(self.lengths) + rank * self.num_local_tokens - sum(num_valid[:rank])
        num_pad = self.num_local_tokens - num_valid[rank]
        return np.concatenate([valid_ids, np.arange(first_pad, first_pad + num_pad, dtype=np.int64)])

    def token_ids_of_ranks(self) -> tuple[np.ndarray, ...]:
        """Return :meth:`token_ids_of` of every rank."""
        return tuple(self.token_ids_of(rank) for rank in range(self.size))
