"""Threads that each run small products on one core, for work that falls apart into independent pieces.

A product of some hundred rows is too small to be divided among cores, but the experts of a layer are many: each core
takes some of them whole. torch's own threads stay as they are for everything else.

Used by CPU backends. It computes nothing itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from os import getpid
from threading import Barrier

import torch

_MOST_IMBALANCE = 1.5
"""Time of the core with the most work, in units of the mean, up to which sharing out is faster than dividing each
piece among all cores (which a product of some hundred rows makes poor use of)."""


@functools.cache
def shared_pool() -> CorePool:
    """Return the pool of this process: kernels of several roles take turns on the same cores."""
    return CorePool()


class CorePool:
    """As many threads as torch uses, made when they are first needed."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._made_for: tuple[int, int] | None = None

    def run(self, pieces: Sequence[Callable[[], None]], costs: Sequence[int]) -> None:
        """Run all pieces, in any order, without autograd: shared out among cores where that keeps all of them busy.

        Args:
            pieces: Each writes to memory of its own.
            costs: Relative time of each, to share them out evenly.

        Raises:
            Exception: The first error of a piece. No piece runs any more when it is raised; some may not have run.
        """
        num_threads = torch.get_num_threads()
        is_inference = torch.is_inference_mode_enabled()
        shares = share_out(costs, num_threads)
        dearest = max(sum(costs[index] for index in share) for share in shares)
        if num_threads < 2 or len(pieces) < 2 or dearest * num_threads > _MOST_IMBALANCE * sum(costs):
            # One core would work while others wait: better all cores on one piece after the other.
            _run_all(pieces, is_inference)
            return
        threads = self._threads()
        work = [[pieces[index] for index in share] for share in shares if share]
        futures = [threads.submit(_run_all, share, is_inference) for share in work]
        try:
            for future in futures:
                future.result()
        finally:
            # Also behind an error or Ctrl-C: what the others read and write belongs to the caller.
            wait(futures)

    def _threads(self) -> ThreadPoolExecutor:
        """The threads; new ones if torch's number has changed, or in a process that was forked, which has none."""
        num_threads = torch.get_num_threads()
        made_for = num_threads, getpid()
        if self._pool is None or self._made_for != made_for:
            if self._pool is not None and self._made_for is not None and self._made_for[1] == made_for[1]:
                self._pool.shutdown()
            self._made_for = made_for
            self._pool = ThreadPoolExecutor(num_threads, "core", initializer=_take_one_core)
            # Each task holds its thread until all of them are there.
            everybody = Barrier(num_threads)
            wait([self._pool.submit(everybody.wait) for _ in range(num_threads)])
            # The initializers set the number of threads that later threads start with, too.
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


def _run_all(pieces: Sequence[Callable[[], None]], is_inference: bool) -> None:
    """Grad mode and inference mode belong to a thread: take over the caller's."""
    with torch.inference_mode(is_inference), torch.no_grad():
        for piece in pieces:
            piece()
