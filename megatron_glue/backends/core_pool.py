"""Threads that each run small products on one core, for work that falls apart into independent pieces.

A product of some hundred rows is too small to be divided among cores, but the experts of a layer are many: each core
takes some of them whole. torch's own threads stay as they are for everything else.

Used by CPU backends. It computes nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch


class CorePool:
    """As many threads as torch uses, made when they are first needed."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._num_threads = 0

    def run(self, pieces: Sequence[Callable[[], None]], costs: Sequence[int]) -> None:
        """Run all pieces, in any order, without autograd.

        Args:
            pieces: Each writes to memory of its own.
            costs: Relative time of each, to share them out evenly.

        Raises:
            Exception: What a piece raised; the others may not have run.
        """
        num_threads = min(torch.get_num_threads(), len(pieces))
        if num_threads < 2:
            _run_all(pieces)
            return
        shares = share_out(costs, num_threads)
        futures = [self._threads().submit(_run_all, [pieces[index] for index in share]) for share in shares]
        for future in futures:
            future.result()

    def _threads(self) -> ThreadPoolExecutor:
        num_threads = torch.get_num_threads()
        if self._pool is None or self._num_threads != num_threads:
            if self._pool is not None:
                self._pool.shutdown()
            self._num_threads = num_threads
            self._pool = ThreadPoolExecutor(num_threads, "core", initializer=_take_one_core)
            for future in [self._pool.submit(torch.get_num_threads) for _ in range(num_threads)]:
                future.result()
            # A thread's own number is set by itself, and so is the number of threads that are still to be made.
            torch.set_num_threads(num_threads)
        return self._pool


def _take_one_core() -> None:
    """Let a new thread compute on one core, and OpenMP know that there are more threads than cores.

    OpenMP's own threads spin for milliseconds behind every parallel loop, on the cores that this pool wants. GNU's
    runtime spins a thousandth of that once it manages more threads than there are cores: the thread that it makes here
    for a loop of two goes to sleep and stays.
    """
    torch.set_num_threads(2)
    torch.ones(2**17).add_(1.0)
    torch.set_num_threads(1)


def share_out(costs: Sequence[int], num_shares: int) -> list[list[int]]:
    """Deal pieces out so that shares cost about the same: the dearest first, each to the cheapest share.

    Args:
        costs: Of each piece.
        num_shares: At least 1.

    Returns:
        Indices of the pieces of each share.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    totals = [0] * num_shares
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        cheapest = totals.index(min(totals))
        shares[cheapest].append(index)
        totals[cheapest] += costs[index]
    return shares


@torch.no_grad()
def _run_all(pieces: Sequence[Callable[[], None]]) -> None:
    for piece in pieces:
        piece()
