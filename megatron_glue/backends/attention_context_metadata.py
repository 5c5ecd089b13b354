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
piece of a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_glue.backends.attention_metadata import effective_window, to_device
from megatron_glue.types import ContextShard, PackedSequence

Spans = tuple[tuple[int, int], tuple[int, int]]
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


@dataclass(frozen=True)
class _Job:
    """One piece of queries and the keys at hand that it sees.

    Attributes:
        kind: Jobs of one kind in one step have different queries.
        first_query: Row of the first query.
        num_queries: At least 1; they stand in one stretch.
        key_rows: At least one row.
        distance: Position of the first query less that of the first key; ``None`` if every query sees every key.
        is_new: Whether no earlier job has these queries.
    """

    kind: int
    first_query: int
    num_queries: int
    key_rows: np.ndarray
    distance: int | None
    is_new: bool


def build_context(sequence: PackedSequence, window: int, *, is_ring: bool, is_varlen: bool) -> ContextMetadata:
    """Plan the attention of one context-parallel rank.

    Args:
        sequence: The rank's part of a micro-batch, on the device of the layer.
        window: Tokens that a query sees, itself included; 0 for all before it.
        is_ring: Whether keys come rank by rank, else all at once.
        is_varlen: Whether blocks are for a kernel that takes cumulative lengths. Bands that it cannot express, those
            of a window in a ring, become blocks of one shape all the same.

    Returns:
        The metadata.
    """
    shard = sequence.context_shard
    assert shard is not None, "the whole micro-batch needs no exchange"
    assert sequence.token_ids_T is not None
    window = effective_window(window, shard.lengths)
    num_rows = max(shard.num_valid_tokens_of_ranks)
    tokens_of_ranks = [shard.token_ids_of(rank)[:num_rows] for rank in range(shard.size)]
    pool = _RowPool()
    if is_ring:
        order = [(shard.rank - step) % shard.size for step in range(shard.size)]
        plans = [_plan(_jobs_of_ring(shard, source, window), is_varlen, pool) for source in order]
        key_tokens = [pool.add(tokens_of_ranks[source]) for source in order]
    else:
        plans = [_plan(_jobs_of_gather(shard, tokens_of_ranks, window), is_varlen, pool)]
        key_tokens = [pool.add(np.concatenate(tokens_of_ranks))]
    upload = pool.upload(sequence.device)
    biases: dict[tuple[int, int, int], Tensor] = {}
    return ContextMetadata(
        num_tokens=sequence.num_tokens,
        num_valid_tokens=sequence.num_valid_tokens,
        num_exchanged_rows=num_rows,
        steps=tuple(tuple(planned.build(upload, biases, window) for planned in plan) for plan in plans),
        query_tokens_V=sequence.token_ids_T[: sequence.num_valid_tokens],
        key_tokens=tuple(upload[handle] for handle in key_tokens),
    )


def _jobs_of_gather(shard: ContextShard, tokens_of_ranks: list[np.ndarray], window: int) -> Iterator[_Job]:
    """Yield each piece of this rank with its segment's tokens up to its end, wherever they stand among all rows."""
    tokens = np.concatenate(tokens_of_ranks)
    row_of_token = np.empty(shard.num_tokens, dtype=np.int64)
    row_of_token[tokens] = np.arange(len(tokens))
    row = 0
    for first, pieces in zip(itertools.accumulate(shard.lengths, initial=0), shard.spans_of(shard.rank)):
        for half, (begin, end) in enumerate(pieces):
            if begin < end:
                first_key = max(0, begin - window + 1) if window else 0
                key_rows = row_of_token[first + first_key : first + end]
                yield _Job(half, row, end - begin, key_rows, begin - first_key, True)
                row += end - begin


def _jobs_of_ring(shard: ContextShard, source: int, window: int) -> Iterator[_Job]:
    """Yield what this rank's queries see of the keys of one rank."""
    row, key_row = 0, 0
    for own, other in zip(shard.spans_of(shard.rank), shard.spans_of(source), strict=True):
        early, late = (end - begin for begin, end in own)
        early_keys, late_keys = (end - begin for begin, end in other)
        if window:
            yield from _windowed_jobs((own, row), (other, key_row), window, source == shard.rank)
        elif source == shard.rank:
            # Its two pieces, one behind the other, are in the order of positions.
            yield from _stretch(row, early + late, key_row, early + late, 0, True)
        elif source < shard.rank:
            yield from _stretch(row, early + late, key_row, early_keys, None, False)
        else:
            yield from _stretch(row + early, late, key_row, early_keys + late_keys, None, False)
        row += early + late
        key_row += early_keys + late_keys


def _stretch(
    row: int, num_queries: int, key_row: int, num_keys: int, distance: int | None, is_new: bool
) -> Iterator[_Job]:
    if num_queries and num_keys:
        yield _Job(0, row, num_queries, np.arange(key_row, key_row + num_keys), distance, is_new)


def _windowed_jobs(own: tuple[Spans, int], other: tuple[Spans, int], window: int, is_self: bool) -> Iterator[_Job]:
    """Yield what each piece of queries sees of each piece of keys through a window: every query at least one key."""
    (pieces, row), (key_pieces, key_row) = own, other
    first_rows = (row, row + pieces[0][1] - pieces[0][0])
    first_key_rows = (key_row, key_row + key_pieces[0][1] - key_pieces[0][0])
    # No early piece sees a late one.
    for half, key_half in ((0, 0), (1, 1), (1, 0)):
        (begin, end), (key_begin, key_end) = pieces[half], key_pieces[key_half]
        first_key, last_key = max(key_begin, begin - window + 1), min(key_end, end)
        last = min(end, last_key + window - 1)
        if begin >= last or first_key >= last_key:
            continue
        sees_all = last_key <= begin and last - 1 - first_key < window
        rows = np.arange(first_key, last_key) + (first_key_rows[key_half] - key_begin)
        yield _Job(
            kind=2 * half + key_half,
            first_query=first_rows[half],
            num_queries=last - begin,
            key_rows=rows,
            distance=None if sees_all else begin - first_key,
            is_new=is_self and half == key_half,
        )


class _RowPool:
    """Gathers index arrays, so that they reach the device in one copy."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def add(self, array: np.ndarray) -> int:
        """Return a handle for the result of :meth:`upload`."""
        self._arrays.append(array)
        return len(self._arrays) - 1

    def add_rows(self, rows: np.ndarray) -> slice | int:
        """Return the rows as one stretch if they are one, else a handle."""
        first, count = int(rows[0]), len(rows)
        if rows[-1] - first == count - 1 and (np.diff(rows) == 1).all():
            return slice(first, first + count)
        return self.add(rows)

    def upload(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return all arrays on the device, in the order in which they were added."""
        flat = np.concatenate([np.empty(0, dtype=np.int64), *self._arrays])
        return to_device(flat, device).split([len(array) for array in self._arrays])


@dataclass(frozen=True)
class _Planned:
    """A block whose indices are not yet on the device. See :class:`Block` and :class:`VarlenBlock`."""

    query_rows: slice | int
    key_rows: slice | int
    boundaries: tuple[int, int] | None
    lengths: tuple[int, int]
    num_pieces: int
    is_new: bool
    distance: int | None

    def build(
        self, upload: tuple[Tensor, ...], biases: dict[tuple[int, int, int], Tensor], window: int
    ) -> Block | VarlenBlock:
        query_rows, key_rows = (
            rows if isinstance(rows, slice) else upload[rows] for rows in (self.query_rows, self.key_rows)
        )
        if self.boundaries is not None:
            cu_seqlens_q, cu_seqlens_k = (upload[handle].to(torch.int32) for handle in self.boundaries)
            is_causal = self.distance is not None
            return VarlenBlock(
                query_rows,
                key_rows,
                cu_seqlens_q,
                cu_seqlens_k,
                *self.lengths,
                is_new=self.is_new,
                is_causal=is_causal,
                window=window if is_causal else 0,
            )
        num_queries, num_keys = self.lengths
        is_causal = self.distance == 0 and num_queries == num_keys and (not window or num_keys <= window)
        bias_LK = None
        if self.distance is not None and not is_causal:
            key = (num_queries, num_keys, self.distance)
            if key not in biases:
                biases[key] = _band(key, window, upload[0].device)
            bias_LK = biases[key]
        return Block(query_rows, key_rows, self.num_pieces, self.is_new, is_causal, bias_LK)


def _band(shape: tuple[int, int, int], window: int, device: torch.device) -> Tensor:
    """fp32 [L, K]: 0 where the key is not behind the query and inside its window, -inf elsewhere."""
    num_queries, num_keys, distance = shape
    ahead_LK = torch.arange(num_queries, device=device)[:, None] + distance - torch.arange(num_keys, device=device)
    hidden_LK = ahead_LK < 0
    if window:
        hidden_LK |= ahead_LK >= window
    return torch.zeros(num_queries, num_keys, device=device).masked_fill_(hidden_LK, float("-inf"))


def _plan(jobs: Iterator[_Job], is_varlen: bool, pool: _RowPool) -> list[_Planned]:
    """Put jobs together that one kernel call can do, in the order of their first."""
    together: dict[tuple[object, ...], list[_Job]] = {}
    for job in jobs:
        num_keys = len(job.key_rows)
        # The kernel for cumulative lengths aligns the last query with the last key.
        is_aligned = job.distance is None or job.distance == num_keys - job.num_queries
        if is_varlen and is_aligned:
            key = (job.kind, job.is_new, job.distance is None)
        else:
            key = (job.kind, job.is_new, job.num_queries, num_keys, job.distance)
        together.setdefault(key, []).append(job)
    # Whatever has new queries comes first.
    groups = sorted(together.items(), key=lambda item: not item[1][0].is_new)
    planned = []
    for key, group in groups:
        num_queries = [job.num_queries for job in group]
        num_keys = [len(job.key_rows) for job in group]
        boundaries = None
        if len(key) == 3:
            boundaries = (pool.add(_boundaries(num_queries)), pool.add(_boundaries(num_keys)))
        planned.append(
            _Planned(
                query_rows=pool.add_rows(
                    np.concatenate([np.arange(job.first_query, job.first_query + job.num_queries) for job in group])
                ),
                key_rows=pool.add_rows(np.concatenate([job.key_rows for job in group])),
                boundaries=boundaries,
                lengths=(max(num_queries), max(num_keys)),
                num_pieces=len(group),
                is_new=group[0].is_new,
                distance=group[0].distance,
            )
        )
    return planned


def _boundaries(counts: list[int]) -> np.ndarray:
    return np.cumsum([0, *counts], dtype=np.int64)
