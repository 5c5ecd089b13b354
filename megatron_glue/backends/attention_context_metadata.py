"""What context-parallel attention needs to know about a packed micro-batch, built from host integers.

A rank has the queries of an early and a late piece of every segment. With the keys of all ranks at hand (gather) each
piece meets the segment's tokens up to its own end. In a ring the keys of one rank are at hand at a time; of those, a
query either sees all or none, except in the first step, where a rank meets its own tokens:

- keys of a rank before this one: both pieces of queries see its early piece, none its late piece;
- keys of a rank behind this one: the late queries see both of its pieces, the early queries none.

So no block that is hidden as a whole is ever computed, and ranks have about the same number of pairs in every step. A
sliding window cuts further keys and queries off, and leaves a band of what remains.

Blocks of one shape are put together; a kernel that takes cumulative lengths gets all segments at once. Nothing here
reads a device value. When it runs, once per micro-batch or once per layer, is decided in ``layers/packed_metadata.py``.

Shape suffixes: V valid tokens of this rank, R rows that each rank hands to the others, L queries and K keys of one
piece of a block, S segments, J jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_glue.backends.attention_masks import BandSource, CausalBand, build_band
from megatron_glue.backends.attention_metadata import effective_window, to_device
from megatron_glue.types import ContextShard, PackedSequence

Rows = slice | Tensor
"""Rows of a tensor: one stretch, or int64 indices."""


@dataclass(frozen=True, eq=False)
class Block:
    """Pieces of queries, all of one length, each against keys of one length.

    Attributes:
        query_rows: Rows of this rank's queries, piece after piece; each row once.
        key_rows: Rows of the keys at hand, piece after piece; each row once.
        num_pieces: Number of pieces.
        is_new: Whether no earlier block has these queries.
        is_causal: Whether query i of a piece sees its keys 0 to i.
        bias_LK: fp32. 0 where a query sees a key and -inf elsewhere; ``None`` if it sees all or ``is_causal`` says it.
    """

    query_rows: Rows
    key_rows: Rows
    num_pieces: int
    is_new: bool
    is_causal: bool
    bias_LK: Tensor | None


@dataclass(frozen=True, eq=False)
class VarlenBlock:
    """Pieces of queries of any length, for a kernel that takes cumulative lengths.

    Attributes:
        query_rows: As in :class:`Block`.
        key_rows: As in :class:`Block`.
        cu_seqlens_q: int32. Boundaries of the pieces of queries, strictly increasing from 0.
        cu_seqlens_k: int32. Boundaries of their keys, strictly increasing from 0.
        max_seqlen_q: Longest piece of queries, a host integer.
        max_seqlen_k: Longest piece of keys, a host integer.
        is_new: As in :class:`Block`.
        is_causal: Whether the last query of a piece sees its last key, the one before it the key before, and so on.
        window: Keys that a query then sees at most; 0 for all before it.
    """

    query_rows: Rows
    key_rows: Rows
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    is_new: bool
    is_causal: bool
    window: int


@dataclass(frozen=True, eq=False)
class ContextMetadata:
    """What this rank does with the keys of all ranks.

    Attributes:
        num_tokens: Rows of this rank, padding included.
        num_valid_tokens: V.
        num_exchanged_rows: R, the most real tokens that a rank has: the same on all of them.
        steps: Per step of the exchange, blocks of queries and the keys at hand then. All visible pairs are in one of
            them; the first that has a query is new.
        query_tokens_V: int64. Index of each query in the whole micro-batch.
        key_tokens: int64. Per step, index in the whole micro-batch of each row of the keys at hand.
    """

    num_tokens: int
    num_valid_tokens: int
    num_exchanged_rows: int
    steps: tuple[tuple[Block | VarlenBlock, ...], ...]
    query_tokens_V: Tensor
    key_tokens: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class _Jobs:
    """Pieces of queries, each with the stretch of keys that it sees. Arrays are int64.

    Attributes:
        first_query_J: Row of the first query of each piece.
        num_queries_J: At least 1. No two pieces have a query in common.
        first_key_J: Place of the first key.
        num_keys_J: At least 1. No two pieces have a key in common.
        distance_J: Position of the first query less that of the first key; ``None`` if queries see all these keys.
        is_new: Whether no earlier job has these queries.
    """

    first_query_J: np.ndarray
    num_queries_J: np.ndarray
    first_key_J: np.ndarray
    num_keys_J: np.ndarray
    distance_J: np.ndarray | None
    is_new: bool

    def where(self, chosen_J: np.ndarray) -> _Jobs:
        """Return some of the jobs."""
        return _Jobs(
            self.first_query_J[chosen_J],
            self.num_queries_J[chosen_J],
            self.first_key_J[chosen_J],
            self.num_keys_J[chosen_J],
            None if self.distance_J is None else self.distance_J[chosen_J],
            self.is_new,
        )

    def with_pairs(self) -> _Jobs:
        """Leave out the jobs without a query or a key."""
        return self.where((self.num_queries_J > 0) & (self.num_keys_J > 0))


def build_context(
    sequence: PackedSequence,
    window: int,
    *,
    is_ring: bool,
    is_varlen: bool,
    bands: BandSource = build_band,
    token_ids_of_ranks: Sequence[np.ndarray] | None = None,
) -> ContextMetadata:
    """Plan the attention of one context-parallel rank.

    Args:
        sequence: The rank's part of a micro-batch, on the device of the layer.
        window: Tokens that a query sees, itself included; 0 for all before it.
        is_ring: Whether keys come rank by rank, else all at once.
        is_varlen: Whether blocks are for a kernel that takes cumulative lengths. Bands that it cannot express, those
            of a window in a ring, become blocks of one shape all the same.
        bands: Where biases come from.
        token_ids_of_ranks: As ``shard.token_ids_of_ranks()`` returns them; ``None`` calls it.

    Returns:
        The metadata.
    """
    shard = sequence.context_shard
    assert shard is not None, "the whole micro-batch needs no exchange"
    assert sequence.token_ids_T is not None
    window = effective_window(window, shard.lengths)
    num_rows = max(shard.num_valid_tokens_of_ranks)
    tokens_of_ranks = [token_ids[:num_rows] for token_ids in token_ids_of_ranks or shard.token_ids_of_ranks()]
    planner = _Planner(sequence.device, window, is_varlen, bands)
    if is_ring:
        order = [(shard.rank - step) % shard.size for step in range(shard.size)]
        steps = [planner.plan(_jobs_of_ring(shard, source, window), None) for source in order]
        key_tokens = [planner.add(tokens_of_ranks[source]) for source in order]
    else:
        tokens = np.concatenate(tokens_of_ranks)
        row_of_token = np.empty(shard.num_tokens, dtype=np.int64)
        row_of_token[tokens] = np.arange(len(tokens))
        steps = [planner.plan(_jobs_of_gather(shard, window), row_of_token)]
        key_tokens = [planner.add(tokens)]
    planner.upload()
    return ContextMetadata(
        num_tokens=sequence.num_tokens,
        num_valid_tokens=sequence.num_valid_tokens,
        num_exchanged_rows=num_rows,
        steps=tuple(tuple(planner.build(planned) for planned in step) for step in steps),
        query_tokens_V=sequence.token_ids_T[: sequence.num_valid_tokens],
        key_tokens=tuple(planner.array(handle) for handle in key_tokens),
    )


def _rows_and_counts(pieces_S22: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each piece begins in its rank's rows, and how many tokens it has, [S, 2] each."""
    counts_S2 = pieces_S22[:, :, 1] - pieces_S22[:, :, 0]
    return (np.cumsum(counts_S2) - counts_S2.ravel()).reshape(counts_S2.shape), counts_S2


def _jobs_of_gather(shard: ContextShard, window: int) -> list[_Jobs]:
    """Return each piece of this rank with its segment's tokens up to its end. Keys are places in the micro-batch."""
    pieces_S22 = shard.pieces_of(shard.rank)
    rows_S2, counts_S2 = _rows_and_counts(pieces_S22)
    jobs = []
    for half in (0, 1):
        begin_S, end_S = pieces_S22[:, half, 0], pieces_S22[:, half, 1]
        first_S = np.maximum(begin_S - window + 1, 0) if window else np.zeros_like(begin_S)
        keys_S = shard.first_tokens_S + first_S
        jobs.append(_Jobs(rows_S2[:, half], counts_S2[:, half], keys_S, end_S - first_S, begin_S - first_S, True))
    return [of_half.with_pairs() for of_half in jobs]


def _jobs_of_ring(shard: ContextShard, source: int, window: int) -> list[_Jobs]:
    """Return what this rank's queries see of the keys of one rank. Keys are rows of that rank."""
    pieces_S22, key_pieces_S22 = shard.pieces_of(shard.rank), shard.pieces_of(source)
    (rows_S2, counts_S2), (key_rows_S2, key_counts_S2) = map(_rows_and_counts, (pieces_S22, key_pieces_S22))
    is_self = source == shard.rank
    if window:
        # A query's own piece first: it always sees itself there. No early piece sees a late one.
        return [
            part.with_pairs()
            for half, key_half in ((0, 0), (1, 1), (1, 0))
            for part in _windowed_jobs(
                (pieces_S22[:, half], rows_S2[:, half]),
                (key_pieces_S22[:, key_half], key_rows_S2[:, key_half]),
                window,
                is_self and half == key_half,
            )
        ]
    first_row_S, num_S = rows_S2[:, 0], counts_S2.sum(axis=1)
    first_key_S, num_keys_S = key_rows_S2[:, 0], key_counts_S2.sum(axis=1)
    if is_self:
        # Its two pieces, one behind the other, are in the order of positions.
        jobs = _Jobs(first_row_S, num_S, first_key_S, num_keys_S, np.zeros_like(num_S), True)
    elif source < shard.rank:
        jobs = _Jobs(first_row_S, num_S, first_key_S, key_counts_S2[:, 0], None, False)
    else:
        jobs = _Jobs(rows_S2[:, 1], counts_S2[:, 1], first_key_S, num_keys_S, None, False)
    return [jobs.with_pairs()]


def _windowed_jobs(
    queries: tuple[np.ndarray, np.ndarray], keys: tuple[np.ndarray, np.ndarray], window: int, is_new: bool
) -> list[_Jobs]:
    """Return what pieces of queries see of pieces of keys through a window: the bands, and what they see as a whole.

    Cut so that every query sees a key and every key is seen.

    Args:
        queries: Positions [S, 2] of the pieces, and their first rows [S].
        keys: Likewise.
        window: Positive.
        is_new: See :class:`_Jobs`.
    """
    (pieces_S2, rows_S), (key_pieces_S2, key_rows_S) = queries, keys
    begin_S = pieces_S2[:, 0]
    first_key_S = np.maximum(key_pieces_S2[:, 0], begin_S - window + 1)
    end_key_S = np.minimum(key_pieces_S2[:, 1], pieces_S2[:, 1])
    end_S = np.minimum(pieces_S2[:, 1], end_key_S + window - 1)
    # Keys behind the queries leave an empty stretch, which with_pairs() drops.
    jobs = _Jobs(
        rows_S,
        end_S - begin_S,
        key_rows_S + first_key_S - key_pieces_S2[:, 0],
        end_key_S - first_key_S,
        begin_S - first_key_S,
        is_new,
    )
    sees_all_S = (end_key_S <= begin_S) & (end_S - 1 - first_key_S < window)
    return [jobs.where(~sees_all_S), replace(jobs.where(sees_all_S), distance_J=None)]


@dataclass(frozen=True)
class _Planned:
    """A block whose indices are not yet on the device. See :class:`Block` and :class:`VarlenBlock`.

    Rows and boundaries are handles of the planner's arrays, or rows that are one stretch.
    """

    query_rows: slice | int
    key_rows: slice | int
    boundaries: tuple[int, int] | None
    lengths: tuple[int, int]
    num_pieces: int
    is_new: bool
    distance: int | None


class _Planner:
    """Puts jobs together that one kernel call can do, and brings all index arrays to the device in one copy."""

    def __init__(self, device: torch.device, window: int, is_varlen: bool, bands: BandSource) -> None:
        self._device, self._window, self._is_varlen, self._source = device, window, is_varlen, bands
        self._arrays: list[np.ndarray] = []
        self._uploaded: tuple[Tensor, ...] = ()
        self._bands: dict[tuple[int, int, int], Tensor] = {}

    def add(self, array: np.ndarray) -> int:
        """Return a handle for :meth:`array`."""
        self._arrays.append(array)
        return len(self._arrays) - 1

    def upload(self) -> None:
        """Copy what was added so far."""
        flat = to_device(np.concatenate(self._arrays), self._device)
        self._uploaded = flat.split([len(array) for array in self._arrays])

    def array(self, handle: int) -> Tensor:
        """Return an array on the device, after :meth:`upload`."""
        return self._uploaded[handle]

    def plan(self, all_jobs: list[_Jobs], row_of_key: np.ndarray | None) -> list[_Planned]:
        """Plan the blocks of one step.

        Args:
            all_jobs: Those with new queries first.
            row_of_key: Row of each place that jobs name as a key; ``None`` if they name rows.
        """
        planned = []
        for jobs in all_jobs:
            if len(jobs.num_queries_J) == 0:
                continue
            if self._is_varlen and _is_aligned(jobs):
                boundaries = (self.add(_boundaries(jobs.num_queries_J)), self.add(_boundaries(jobs.num_keys_J)))
                planned.append(self._planned(jobs, row_of_key, boundaries))
            else:
                planned += [self._planned(group, row_of_key, None) for group in _groups_of_one_shape(jobs)]
        return planned

    def _planned(self, jobs: _Jobs, row_of_key: np.ndarray | None, boundaries: tuple[int, int] | None) -> _Planned:
        return _Planned(
            query_rows=self._add_rows(jobs.first_query_J, jobs.num_queries_J, None),
            key_rows=self._add_rows(jobs.first_key_J, jobs.num_keys_J, row_of_key),
            boundaries=boundaries,
            lengths=(int(jobs.num_queries_J.max()), int(jobs.num_keys_J.max())),
            num_pieces=len(jobs.num_queries_J),
            is_new=jobs.is_new,
            distance=None if jobs.distance_J is None else int(jobs.distance_J[0]),
        )

    def _add_rows(self, firsts: np.ndarray, counts: np.ndarray, row_of_place: np.ndarray | None) -> slice | int:
        """Return the rows of stretches of places: as a slice if they are one stretch themselves, else a handle."""
        is_one = bool((firsts[1:] == (firsts + counts)[:-1]).all())
        if is_one and row_of_place is None:
            return slice(int(firsts[0]), int(firsts[-1] + counts[-1]))
        ends = np.cumsum(counts)
        rows = np.arange(ends[-1]) + np.repeat(firsts - (ends - counts), counts)
        return self.add(rows if row_of_place is None else row_of_place[rows])

    def build(self, planned: _Planned) -> Block | VarlenBlock:
        """Return a block with its indices on the device."""
        query_rows, key_rows = (
            rows if isinstance(rows, slice) else self._uploaded[rows] for rows in (planned.query_rows, planned.key_rows)
        )
        if planned.boundaries is not None:
            cu_seqlens_q, cu_seqlens_k = (self._uploaded[handle].to(torch.int32) for handle in planned.boundaries)
            is_causal = planned.distance is not None
            return VarlenBlock(
                query_rows,
                key_rows,
                cu_seqlens_q,
                cu_seqlens_k,
                *planned.lengths,
                is_new=planned.is_new,
                is_causal=is_causal,
                window=self._window if is_causal else 0,
            )
        num_queries, num_keys = planned.lengths
        is_hidden_by_window = 0 < self._window < num_keys
        is_causal = planned.distance == 0 and num_queries == num_keys and not is_hidden_by_window
        bias_LK = None
        if planned.distance is not None and not is_causal:
            bias_LK = self._band((num_queries, num_keys, planned.distance))
        return Block(query_rows, key_rows, planned.num_pieces, planned.is_new, is_causal, bias_LK)

    def _band(self, shape: tuple[int, int, int]) -> Tensor:
        """fp32 [L, K]: 0 where the key is not behind the query and inside its window, -inf elsewhere."""
        if shape not in self._bands:
            self._bands[shape] = self._source(CausalBand(*shape, self._window, torch.float32, self._device))
        return self._bands[shape]


def _is_aligned(jobs: _Jobs) -> bool:
    """Whether the last query of each piece stands at its last key: that is what the varlen kernel calls causal."""
    return jobs.distance_J is None or bool((jobs.distance_J == jobs.num_keys_J - jobs.num_queries_J).all())


def _groups_of_one_shape(jobs: _Jobs) -> list[_Jobs]:
    distance_J = np.zeros_like(jobs.num_queries_J) if jobs.distance_J is None else jobs.distance_J
    groups: dict[tuple[int, int, int], list[int]] = {}
    for index, shape in enumerate(zip(jobs.num_queries_J, jobs.num_keys_J, distance_J, strict=True)):
        groups.setdefault(shape, []).append(index)
    return [jobs.where(np.array(group)) for group in groups.values()]


def _boundaries(counts: np.ndarray) -> np.ndarray:
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
