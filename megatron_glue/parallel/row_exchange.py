"""An exchange of rows that runs while something else is computed, in both passes.

``start`` launches the all-to-all and returns at once; ``finish`` waits for it. What is computed between the two must
not need the received rows. Backward mirrors this without further help: the backward of ``finish`` launches the reverse
exchange and that of ``start`` waits for it, and in between autograd runs what was computed between the two in forward,
because it prefers nodes that were made later.

On a GPU the exchange runs on the stream of its process group. That stream waits for the present one when the exchange
is launched, the present one waits for it at the end, and all buffers are held until then: so nobody reads rows that
have not arrived, and no buffer is reused under the exchange.

Stands around an expert-parallel layer's shared expert. The exchange itself is that of ``collectives.all_to_all_rows``.

Shape suffixes: S sent rows, R received rows, D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_glue.parallel.collectives import Pending


class RowExchange:
    """One uneven all-to-all. Every use needs an object of its own.

    The autograd edges and both collectives exist even when this rank sends or receives no row.

    Args:
        send_splits: Rows for each rank (host integers).
        receive_splits: Rows from each rank (host integers).
        group: Ranks that take part.

    Raises:
        ValueError: If a split list does not fit the group.
    """

    def __init__(self, send_splits: Sequence[int], receive_splits: Sequence[int], group: ProcessGroup) -> None:
        for name, splits in (("send_splits", send_splits), ("receive_splits", receive_splits)):
            if len(splits) != group.size():
                raise ValueError(f"{name}: {len(splits)} entries for a group of {group.size()} ranks")
        self._send_splits, self._receive_splits = list(send_splits), list(receive_splits)
        self._group = group
        self._pending: Pending | None = None
        self._sent: Tensor | None = None

    def start(self, x_SD: Tensor) -> Tensor:
        """Launch the exchange.

        Args:
            x_SD: [S, ...] rows, those for rank 0 first; not to be written to before :meth:`finish`.

        Returns:
            [R, ...] of the same dtype, for :meth:`finish` and nothing else: its values have not arrived.

        Raises:
            ValueError: If the splits do not fit the rows.
        """
        if sum(self._send_splits) != x_SD.shape[0]:
            raise ValueError(
                f"send_splits={tuple(self._send_splits)}: sum {sum(self._send_splits)} for {x_SD.shape[0]} rows"
            )
        return _Start.apply(x_SD, self)

    def finish(self, arriving_RD: Tensor) -> Tensor:
        """Wait for the rows. On a GPU the present stream waits, not the host.

        Args:
            arriving_RD: What :meth:`start` returned.

        Returns:
            [R, ...] rows in the order of the ranks that sent them. Differentiable with respect to the sent rows.
        """
        return _Finish.apply(arriving_RD, self)

    def _launch(self, rows: Tensor, send_splits: list[int], receive_splits: list[int]) -> Tensor:
        assert self._pending is None, "an exchange is launched once in each direction"
        self._sent = rows.contiguous()
        received = rows.new_empty((sum(receive_splits), *rows.shape[1:]))
        work = dist.all_to_all_single(
            received, self._sent, receive_splits, send_splits, group=self._group, async_op=True
        )
        self._pending = Pending(received, work)
        return received

    def _await(self) -> Tensor:
        assert self._pending is not None, "an exchange is awaited after it was launched"
        received = self._pending.wait()
        self._pending = self._sent = None
        return received


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange._launch(x_SD, exchange._send_splits, exchange._receive_splits)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        # What arrives here is what _Finish.backward was given; the answer is on its way already.
        return ctx.exchange._await(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving_RD: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        exchange._await()
        return arriving_RD.view_as(arriving_RD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (grad_RD,) = grad_outputs
        exchange: RowExchange = ctx.exchange
        exchange._launch(grad_RD, exchange._receive_splits, exchange._send_splits)
        return grad_RD, None
