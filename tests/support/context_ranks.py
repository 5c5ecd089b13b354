"""Context-parallel ranks as threads of one process: quick, and every value can be looked at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megatron_glue.backends.attention import AttentionDropout, AttentionKernel
from megatron_glue.backends.attention_context import ContextAttention
from megatron_glue.backends.attention_context_metadata import ContextMetadata, build_context
from megatron_glue.types import PackedSequence


class ThreadExchange:
    """A :class:`ContextExchange` among threads.

    Args:
        rank: This rank.
        is_ring: Whether rows come rank by rank.
        board: What ranks show each other, one slot each; shared by all.
        barrier: Of as many threads as ranks.
    """

    def __init__(self, rank: int, is_ring: bool, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.is_ring = rank, is_ring
        self._board, self._barrier = board, barrier

    def visit_all(self, rows_R: Tensor, visit: Callable[[int, Tensor], None]) -> None:
        """See :class:`ContextExchange`."""
        for step, rows in enumerate(self._rows_by_step(rows_R)):
            visit(step, rows)

    def sum_gradients(self, rows_R: Tensor, gradient: Callable[[int, Tensor], Tensor]) -> Tensor:
        """See :class:`ContextExchange`."""
        size = len(self._board)
        grads = [gradient(step, rows) for step, rows in enumerate(self._rows_by_step(rows_R))]
        if self.is_ring:
            by_rank = [grads[(self.rank - source) % size] for source in range(size)]
        else:
            by_rank = list(grads[0].chunk(size))
        all_grads = self._show(by_rank)
        total = torch.stack([grads_of_rank[self.rank] for grads_of_rank in all_grads]).sum(0)
        return total.to(rows_R.dtype)

    def _rows_by_step(self, rows_R: Tensor) -> list[Tensor]:
        everyone = self._show(rows_R.clone())
        assert len({tuple(rows.shape) for rows in everyone}) == 1, "ranks hand different numbers of rows over"
        if self.is_ring:
            return [everyone[(self.rank - step) % len(everyone)] for step in range(len(everyone))]
        return [torch.cat(everyone)]

    def _show(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait(30)
        everything = list(self._board)
        self._barrier.wait(30)
        return everything


def on_context_ranks(size: int, is_ring: bool, function: Callable[[int, ThreadExchange], Any]) -> list[Any]:
    """Call ``function(rank, exchange)`` on a thread per rank and return all results."""
    board, barrier = [None] * size, threading.Barrier(size)

    def run(rank: int) -> Any:
        try:
            return function(rank, ThreadExchange(rank, is_ring, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, rank) for rank in range(size)]
        # The rank that failed says why; the others only that it left them.
        failures = [failure for future in futures if (failure := future.exception()) is not None]
        failures.sort(key=lambda failure: isinstance(failure, threading.BrokenBarrierError))
        if failures:
            raise failures[0] from None
        return [future.result() for future in futures]


def context_metadata(part: PackedSequence, window: int, is_ring: bool, is_varlen: bool = False) -> ContextMetadata:
    """Build metadata without a cache."""
    return build_context(part, window, is_ring=is_ring, is_varlen=is_varlen)


def refuse(*_: Any, **__: Any) -> Tensor:
    """A kernel for whole micro-batches that nobody should call."""
    raise AssertionError("a split micro-batch reached the kernel of one rank")


REFUSE: AttentionKernel = refuse


class SplitAttention:
    """Attention of a whole micro-batch, computed by context-parallel threads on the device of the queries.

    Args:
        sequence: The whole layout, packed for ``alignment``.
        size: Number of ranks.
        alignment: Segment alignment.
        is_ring: Ring, else gather.
        is_varlen: Blocks for a kernel that takes cumulative lengths.
    """

    def __init__(
        self, sequence: PackedSequence, size: int, alignment: int, is_ring: bool, is_varlen: bool = False
    ) -> None:
        self.parts = [sequence.shard(rank, size, alignment) for rank in range(size)]
        self.is_ring, self.is_varlen = is_ring, is_varlen

    def run(
        self,
        qkv: tuple[Tensor, ...],
        probe_THC: Tensor,
        *,
        window: int = 0,
        scale: float = 0.3,
        dropout: AttentionDropout | None = None,
    ) -> list[Tensor]:
        """Return the output and the gradients of q, k and v, in the order of the whole micro-batch."""

        def on_rank(rank: int, exchange: ThreadExchange) -> list[Tensor]:
            part = self.parts[rank].to(probe_THC.device)
            assert part.token_ids_T is not None
            q, k, v = (x.detach()[part.token_ids_T].requires_grad_() for x in qkv)
            metadata = context_metadata(part, window, self.is_ring, self.is_varlen)
            kernel = ContextAttention(REFUSE, exchange)
            out = kernel(q, k, v, metadata, window=window, scale=scale, dropout=dropout)
            grads = torch.autograd.grad(out, (q, k, v), probe_THC[part.token_ids_T])
            return [out.detach(), *grads]

        results = on_context_ranks(len(self.parts), self.is_ring, on_rank)
        ids = torch.cat([part.token_ids_T for part in self.parts if part.token_ids_T is not None])
        order = torch.argsort(ids).to(probe_THC.device)
        return [torch.cat([result[index] for result in results])[order] for index in range(4)]
