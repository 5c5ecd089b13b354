"""The layout of one packed micro-batch: which tokens belong to which document.

Stands at the start of a batch's way: the packer knows every length on the host and writes them down here once, so that
nobody later has to ask the device. It holds no masks and no kernel arguments: those are built from it by
``layers/packed_metadata.py`` and kept in ``cache_entries``, so that they live no longer than the layout does.

Under context parallelism it describes the rows of one rank and says so in ``context_shard``.

Shape suffixes: T tokens of the micro-batch, S live segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_glue.types.context_shard import ContextShard

PAD_SEGMENT_ID = -1


@dataclass(frozen=True, eq=False)
class PackedSequence:
    """An immutable description of a flat row of packed segments.

    Live segments come first, back to back; padding, if any, is one dead segment at the tail. Build it with
    :meth:`from_lengths`.

    Attributes:
        lengths: Number of tokens of each live segment in this row (host integers): at least 1, and 0 only where
            ``context_shard`` leaves this rank no token of the segment.
        num_pad_tokens: Number of dead tokens at the tail.
        position_starts: Position of each WHOLE segment's first token. Zero for a whole document; a chunk that continues
            a document may start later. Boundaries never depend on it.
        segment_ids_T: int32. Index of the segment that owns each token, ``PAD_SEGMENT_ID`` for padding. All
            context-parallel ranks count segments alike.
        positions_T: int64. Position of each token inside its document, 0 for padding.
        token_ids_T: int64. Index of each token in the micro-batch before it was cut among context-parallel ranks;
            ``None`` when it is whole.
        context_shard: How it was cut; ``None`` when it is whole.
        cache_entries: What ``layers/cache.py`` keeps of this layout: a copy starts with none. It dies with this object.
    """

    lengths: tuple[int, ...]
    num_pad_tokens: int
    position_starts: tuple[int, ...]
    segment_ids_T: Tensor
    positions_T: Tensor
    token_ids_T: Tensor | None = None
    context_shard: ContextShard | None = None
    cache_entries: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if any(length < 1 for length in self.whole_lengths):
            raise ValueError(
                f"lengths={self.whole_lengths}: every segment needs at least one token; drop empty segments"
            )
        self._check_shard()
        if self.num_pad_tokens < 0:
            raise ValueError(f"num_pad_tokens={self.num_pad_tokens}: must not be negative")
        if len(self.position_starts) != len(self.lengths):
            raise ValueError(
                f"position_starts has {len(self.position_starts)} entries for {len(self.lengths)} segments"
            )
        if any(start < 0 for start in self.position_starts):
            raise ValueError(f"position_starts={self.position_starts}: must not be negative")
        for name, tensor, dtype in (
            ("segment_ids_T", self.segment_ids_T, torch.int32),
            ("positions_T", self.positions_T, torch.int64),
            ("token_ids_T", self.token_ids_T, torch.int64),
        ):
            if tensor is None:
                continue
            if tuple(tensor.shape) != (self.num_tokens,):
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; the lengths describe {self.num_tokens} tokens in one row"
                )
            if tensor.dtype != dtype:
                raise ValueError(f"{name} has dtype {tensor.dtype}; expected {dtype}")

    def _check_shard(self) -> None:
        shard = self.context_shard
        if (shard is None) != (self.token_ids_T is None):
            raise ValueError("token_ids_T and context_shard describe one cut: give both or none")
        if shard is None:
            return
        if self.lengths != shard.local_lengths:
            raise ValueError(f"lengths={self.lengths}: the cut leaves rank {shard.rank} {shard.local_lengths}")
        if self.num_tokens != shard.num_local_tokens:
            raise ValueError(f"{self.num_tokens} tokens in the row: the cut gives every rank {shard.num_local_tokens}")

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        num_pad_tokens: int = 0,
        position_starts: Sequence[int] | None = None,
    ) -> PackedSequence:
        """Build the layout on the host from segment lengths.

        Args:
            lengths: Tokens per live segment. Empty segments are dropped, so boundaries strictly increase.
            num_pad_tokens: Dead tokens at the tail.
            position_starts: Position of each segment's first token; ``None`` means 0 for all.

        Returns:
            A layout whose tensors live on the CPU.

        Raises:
            ValueError: On negative lengths, a negative pad count, or a wrong number of position starts.
        """
        starts = [0] * len(lengths) if position_starts is None else [int(start) for start in position_starts]
        if len(starts) != len(lengths):
            raise ValueError(f"position_starts has {len(starts)} entries for {len(lengths)} segments")
        if any(length < 0 for length in lengths):
            raise ValueError(f"lengths={tuple(lengths)}: must not be negative")
        live = [(int(length), start) for length, start in zip(lengths, starts, strict=True) if length > 0]
        live_lengths = np.array([length for length, _ in live], dtype=np.int64)
        live_starts = np.array([start for _, start in live], dtype=np.int64)
        num_valid = int(live_lengths.sum())
        segment_ids = np.full(num_valid + max(num_pad_tokens, 0), PAD_SEGMENT_ID, dtype=np.int32)
        positions = np.zeros(segment_ids.shape, dtype=np.int64)
        if live:
            segment_ids[:num_valid] = np.repeat(np.arange(len(live), dtype=np.int32), live_lengths)
            first_token = np.cumsum(live_lengths) - live_lengths
            positions[:num_valid] = np.arange(num_valid) + np.repeat(live_starts - first_token, live_lengths)
        return cls(
            lengths=tuple(length for length, _ in live),
            num_pad_tokens=num_pad_tokens,
            position_starts=tuple(start for _, start in live),
            segment_ids_T=torch.from_numpy(segment_ids),
            positions_T=torch.from_numpy(positions),
        )

    def shard(self, rank: int, size: int, alignment: int) -> PackedSequence:
        """Return the rows of one context-parallel rank. See :class:`~megatron_glue.types.context_shard.ContextShard`.

        Args:
            rank: The rank.
            size: Number of ranks, at least 2.
            alignment: The segment alignment that the micro-batch was packed with.

        Returns:
            A layout of ``num_tokens / size`` rows, on the CPU.

        Raises:
            ValueError: If the micro-batch is cut already, lies on a device, or was not packed for this cut.
        """
        if self.context_shard is not None or self.device.type != "cpu":
            raise ValueError("only a whole micro-batch on the CPU can be cut among context-parallel ranks")
        shard = ContextShard(rank, size, alignment, self.lengths, self.num_tokens)
        token_ids_T = torch.from_numpy(shard.token_ids_of(rank))
        return PackedSequence(
            lengths=shard.local_lengths,
            num_pad_tokens=shard.num_local_tokens - sum(shard.local_lengths),
            position_starts=self.position_starts,
            segment_ids_T=self.segment_ids_T[token_ids_T],
            positions_T=self.positions_T[token_ids_T],
            token_ids_T=token_ids_T,
            context_shard=shard,
        )

    @property
    def num_segments(self) -> int:
        """Number of live segments of the micro-batch, those without a token in this row included."""
        return len(self.lengths)

    @property
    def whole_lengths(self) -> tuple[int, ...]:
        """Number of tokens of each whole segment, over all context-parallel ranks. Host integers."""
        return self.lengths if self.context_shard is None else self.context_shard.lengths

    @property
    def num_valid_tokens(self) -> int:
        """Number of tokens that belong to a live segment. Host integer."""
        return sum(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the row, padding included. Host integer."""
        return self.num_valid_tokens + self.num_pad_tokens

    @property
    def max_seqlen(self) -> int:
        """Most tokens of one live segment in this row, 0 if there is none. Host integer."""
        return max(self.lengths, default=0)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.segment_ids_T.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedSequence:
        """Return this layout with its tensors on ``device`` and no cache entries; itself if it is there already."""
        if torch.device(device) == self.device:
            return self
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> PackedSequence:
        """Return this layout with ``function`` applied to each tensor, and no cache entries."""
        return replace(
            self,
            segment_ids_T=function(self.segment_ids_T),
            positions_T=function(self.positions_T),
            token_ids_T=None if self.token_ids_T is None else function(self.token_ids_T),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the layout."""
        both = (self.segment_ids_T, self.positions_T)
        return both if self.token_ids_T is None else (*both, self.token_ids_T)
