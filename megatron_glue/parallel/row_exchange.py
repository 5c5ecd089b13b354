"""Exchanges of rows that run while something else is computed, in both passes.

``start`` launches a collective and returns at once; ``finish`` waits for it. What is computed between the two must not
need its result. Backward mirrors this without further help: the backward of ``finish`` launches the reverse collective
and that of ``start`` waits for it, and in between autograd runs what was computed between the two in forward, because
it prefers nodes that were made later.

On a GPU the collective runs on the stream of its process group. That stream waits for the present one when it is
launched, the present one waits for it at the end, and all buffers are held until then: so nobody reads rows that have
not arrived, and no buffer is reused under the exchange.

Stands around the experts and the shared expert of an expert-parallel layer. Exchanges that wait at once are in
``collectives.py``.

Shape suffixes: S sent rows, R received rows, T rows of each rank, P ranks, D model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_glue.parallel.collectives import Pending, start_all_gather_rows, start_reduce_scatter_rows


class AsyncExchange(ABC):
    """A collective and its reverse, each launched once. Every use needs an object of its own.

    The autograd edges and both collectives exist even when this rank sends or receives no row.
    """

    def __init__(self) -> None:
        self._pending: Pending | None = None
        self._sent: Tensor | None = None

    @abstractmethod
    def _forward(self, rows: Tensor) -> Pending:
        """Launch the collective on contiguous rows."""

    @abstractmethod
    def _backward(self, grad_rows: Tensor) -> Pending:
        """Launch the collective that is its transpose."""

    def start(self, rows: Tensor) -> Tensor:
        """Launch the collective.

        Args:
            rows: [S, ...] rows to send; not to be written to before :meth:`finish`.

        Returns:
            [R, ...] of the same dtype, for :meth:`finish` and nothing else: its values have not arrived.
        """
        return _Start.apply(rows, self)

    def finish(self, arriving: Tensor) -> Tensor:
        """Wait for the rows. On a GPU the present stream waits, not the host.

        Args:
            arriving: What :meth:`start` returned.

        Returns:
            [R, ...]. Differentiable with respect to the sent rows.
        """
        return _Finish.apply(arriving, self)

    def _launch(self, rows: Tensor, *, is_backward: bool) -> Tensor:
        assert self._pending is None, "an exchange is launched once in each direction"
        self._sent = rows.contiguous()
        self._pending = self._backward(self._sent) if is_backward else self._forward(self._sent)
        return self._pending.result

    def _await(self) -> Tensor:
        assert self._pending is not None, "an exchange is awaited after it was launched"
        received = self._pending.wait()
        self._pending = self._sent = None
        return received


class RowExchange(AsyncExchange):
    """One uneven all-to-all: rows come out in the order of the ranks that sent them.

    Args:
        send_splits: Rows for each rank (host integers).
        receive_splits: Rows from each rank (host integers).
        group: Ranks that take part.

    Raises:
        ValueError: If a split list does not fit the group.
    """

    def __init__(self, send_splits: Sequence[int], receive_splits: Sequence[int], group: ProcessGroup) -> None:
        super().__init__()
        for name, splits in (("send_splits", send_splits), ("receive_splits", receive_splits)):
            if len(splits) != group.size():
                raise ValueError(f"{name}: {len(splits)} entries for a group of {group.size()} ranks")
        self._send_splits, self._receive_splits = list(send_splits), list(receive_splits)
        self._group = group

    def start(self, rows: Tensor) -> Tensor:
        """Launch the exchange.

        Args:
            rows: [S, ...] rows, those for rank 0 first; not to be written to before :meth:`finish`.

        Returns:
            [R, ...] of the same dtype, for :meth:`finish` and nothing else: its values have not arrived.

        Raises:
            ValueError: If the splits do not fit the rows.
        """
        if sum(self._send_splits) != rows.shape[0]:
            raise ValueError(
                f"send_splits={tuple(self._send_splits)}: sum {sum(self._send_splits)} for {rows.shape[0]} rows"
            )
        return super().start(rows)

    def _forward(self, rows: Tensor) -> Pending:
        return self._all_to_all(rows, self._send_splits, self._receive_splits)

    def _backward(self, grad_rows: Tensor) -> Pending:
        return self._all_to_all(grad_rows, self._receive_splits, self._send_splits)

    def _all_to_all(self, rows: Tensor, send_splits: list[int], receive_splits: list[int]) -> Pending:
        received = rows.new_empty((sum(receive_splits), *rows.shape[1:]))
        work = dist.all_to_all_single(received, rows, receive_splits, send_splits, group=self._group, async_op=True)
        return Pending(received, work)


class RowGather(AsyncExchange):
    """All ranks' rows after each other, in the order of ranks: [T, ...] -> [P * T, ...], T the same on all of them.

    Each rank may use the rows differently: their gradients are summed over ranks.

    Args:
        group: Ranks that take part.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def _forward(self, rows: Tensor) -> Pending:
        return start_all_gather_rows(rows, self._group)

    def _backward(self, grad_rows: Tensor) -> Pending:
        return start_reduce_scatter_rows(grad_rows, self._group)


class RowScatter(AsyncExchange):
    """The sum of all ranks' rows, of which each keeps its share: [P * T, ...] -> [T, ...].

    Args:
        group: Ranks that take part.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def _forward(self, rows: Tensor) -> Pending:
        return start_reduce_scatter_rows(rows, self._group)

    def _backward(self, grad_rows: Tensor) -> Pending:
        return start_all_gather_rows(grad_rows, self._group)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: AsyncExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange._launch(rows, is_backward=False)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        # What arrives here is what _Finish.backward was given; the answer is on its way already.
        return ctx.exchange._await(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, exchange: AsyncExchange) -> Tensor:
        ctx.exchange = exchange
        exchange._await()
        return arriving.view_as(arriving)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (grad_rows,) = grad_outputs
        exchange: AsyncExchange = ctx.exchange
        exchange._launch(grad_rows, is_backward=True)
        return grad_rows, None
