"""Who writes which part of what several ranks hold: worked out at the first save, and kept while nobody's parts change.

The answer depends on names, places and sizes only, which are those of the layout. Later saves therefore ask one number
of every rank, whether its table is another than last time, and the training thread does nothing else here.

Called from ``ranks.py`` when a snapshot is taken. Nothing here reads a tensor.

Shape suffixes: N rows, one for each part of each rank; P parts; S sets of ranks that hold the same parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from megatron_glue.parallel.collectives import gather_rows, max_over_ranks
from megatron_glue.training.checkpoint.tensors import NamedPart

PartLayout = tuple[str, tuple[int, ...], tuple[int, ...], int]
"""Name, offsets, sizes and bytes of a part."""
Integers = NDArray[np.int64]


class WriteShares:
    """What this rank writes of what it holds. All ranks ask together."""

    def __init__(self) -> None:
        self._layout: list[PartLayout] | None = None
        self._is_own: list[bool] = []

    def choose(self, held: Sequence[NamedPart], rank: int, group: ProcessGroup | None) -> list[NamedPart]:
        """Choose the parts that this rank writes, so that each is written once and all ranks write about as much.

        Ranks tell each other hashes of what they hold, not whose replica it is: a tied embedding on two pipeline stages
        is as well known to be one as the replicas of data parallelism.

        Args:
            held: What this rank holds. Parts of the same name and place are equal on all ranks that hold them.
            rank: This one's number in the group.
            group: All ranks; ``None`` for one process.

        Returns:
            Those of ``held`` that this rank writes, in their order.
        """
        if group is None:
            return list(held)
        layout = layout_of(held)
        if max_over_ranks(int(layout != self._layout), group):
            self._is_own = _ask_all(layout, rank, group)
            self._layout = layout
        return [entry for entry, is_own in zip(held, self._is_own, strict=True) if is_own]


def layout_of(parts: Sequence[NamedPart]) -> list[PartLayout]:
    """All that decides who writes them."""
    return [(entry.name, entry.part.offsets, entry.part.sizes, entry.part.tensor.nbytes) for entry in parts]


def key_of(layout: PartLayout) -> int:
    """63 bits of a hash. Should two parts ever collide, the audit before publishing finds the hole."""
    name, offsets, sizes, _ = layout
    return int.from_bytes(hashlib.sha256(f"{name}\0{offsets}\0{sizes}".encode()).digest()[:8], "big") >> 1


def _ask_all(layout: list[PartLayout], rank: int, group: ProcessGroup) -> list[bool]:
    """Which of its parts a rank writes, after all have told what they hold."""
    own = torch.tensor([[key_of(part), part[3]] for part in layout], dtype=torch.int64).reshape(-1, 2)
    tables = [rows.numpy() for rows in gather_rows(own, group)]
    rows = np.concatenate(tables)
    counts = [len(table) for table in tables]
    writers = assign_writers(rows[:, 0], rows[:, 1], np.repeat(np.arange(len(tables)), counts), len(tables))
    begin = sum(counts[:rank])
    return (writers[begin : begin + counts[rank]] == rank).tolist()


def assign_writers(keys_N: Integers, bytes_N: Integers, ranks_N: Integers, num_ranks: int) -> Integers:
    """Choose a writer for every part; deterministic, so that ranks with equal tables choose alike.

    Parts that one rank holds are its own. Then come those of two holders, of three, and so on: what many can write is
    left to make up for the rest. Among parts with the same holders the largest goes first, each to the holder with the
    least so far (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). Sets of holders of the same size are
    dealt with at the same time, so the number of steps is that of parts in a set, not that of all parts.

    Args:
        keys_N: int64, which part it is.
        bytes_N: int64, its size, the same wherever it is held.
        ranks_N: int64, who holds it; ascending.
        num_ranks: Number of ranks.

    Returns:
        [N] int64, the rank that writes the row's part.
    """
    writers_N = ranks_N.copy()
    if not len(keys_N):
        return writers_N
    # The rows of a part stand next to each other then, in the order of ranks.
    order_N = np.argsort(keys_N, kind="stable")
    sorted_N, holders_N = keys_N[order_N], ranks_N[order_N]
    firsts_P = np.flatnonzero(np.concatenate(([True], sorted_N[1:] != sorted_N[:-1])))
    counts_P = np.diff(firsts_P, append=len(keys_N))
    bytes_P, writers_P = bytes_N[order_N][firsts_P], holders_N[firsts_P]
    loads = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(loads, writers_P[counts_P == 1], bytes_P[counts_P == 1])
    # Equal sums of random marks: the same holders.
    marks = np.random.Philox(key=0).random_raw(num_ranks)
    marks_P = np.add.reduceat(marks[holders_N], firsts_P)
    for count in np.unique(counts_P[counts_P > 1]):
        parts = np.flatnonzero(counts_P == count)
        parts = parts[np.lexsort((-bytes_P[parts], marks_P[parts]))]
        marks_of_parts = marks_P[parts]
        starts_S = np.flatnonzero(np.concatenate(([True], marks_of_parts[1:] != marks_of_parts[:-1])))
        lengths_S = np.diff(starts_S, append=len(parts))
        members_SH = holders_N[firsts_P[parts[starts_S]][:, None] + np.arange(count)]
        for turn in range(int(lengths_S.max())):
            is_left_S = lengths_S > turn
            dealt, left_SH = parts[starts_S[is_left_S] + turn], members_SH[is_left_S]
            lightest = loads[left_SH].argmin(axis=1)
            writers_P[dealt] = left_SH[np.arange(len(dealt)), lightest]
            np.add.at(loads, writers_P[dealt], bytes_P[dealt])
    writers_N[order_N] = np.repeat(writers_P, counts_P)
    return writers_N
