"""How context-parallel ranks see each other's rows: all at once, or block by block around a ring.

A rank holds a part of every sequence; its queries need the keys and values of all parts. What is done with them, and
which of them a query may see, is the attention kernel's business: this file hands it the rows, and takes back their
gradients, summed over ranks. Rows are as many on every rank, and every rank calls alike, also one without a real token.

- gather: one all-gather in forward; in backward the same again, then a reduce-scatter of the gradients. The rows of all
  ranks exist on each of them, for the time of one layer.
- ring: each rank passes on what it has got, so two blocks exist at a time (Liu, Zaharia and Abbeel, "Ring Attention",
  arXiv:2310.01889). The next block travels while the present one is used. In backward blocks travel once more, and
  their gradients behind them, until they are home.

Gradients are summed in the dtype that they are computed in, and travel in that of the rows.

Shape suffixes: R rows of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_glue.parallel.collectives import start_all_gather_rows, start_reduce_scatter_rows
from megatron_glue.parallel.mesh import ParallelMesh


class ContextExchange(Protocol):
    """An exchange among the ranks that split each sequence."""

    @property
    def is_ring(self) -> bool:
        """Whether rows come rank by rank: step t brings those of rank ``rank - t``. Else one step brings all."""
        ...

    def visit_all(self, rows_R: Tensor, visit: Callable[[int, Tensor], None]) -> None:
        """Show this rank the rows of all.

        Args:
            rows_R: [R, ...] this rank's rows.
            visit: Called in every step with its number and rows: [R, ...] of one rank in a ring, else [size * R, ...]
                in the order of ranks. They are valid during the call.
        """
        ...

    def sum_gradients(self, rows_R: Tensor, gradient: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Show this rank the rows of all once more, and sum their gradients over ranks.

        Args:
            rows_R: As in :meth:`visit_all`.
            gradient: Called like ``visit``; returns this rank's part of the gradient of the rows it was called with.

        Returns:
            [R, ...] of the dtype of the rows: the gradient of this rank's rows.
        """
        ...


def context_exchange(mesh: ParallelMesh, comm_type: str) -> ContextExchange | None:
    """Return the exchange that a run asks for; ``None`` if no sequence is split.

    Args:
        mesh: The run's mesh.
        comm_type: ``allgather`` or ``p2p`` (ring).
    """
    if mesh.cp_group is None:
        return None
    if comm_type == "p2p":
        return RingExchange(mesh.cp_group, mesh.cp_rank, mesh.cp_size)
    return GatherExchange(mesh.cp_group)


@dataclass(frozen=True, eq=False)
class GatherExchange:
    """All rows at once.

    Attributes:
        group: The ranks.
    """

    group: ProcessGroup

    @property
    def is_ring(self) -> bool:
        """See :class:`ContextExchange`."""
        return False

    def visit_all(self, rows_R: Tensor, visit: Callable[[int, Tensor], None]) -> None:
        """See :class:`ContextExchange`."""
        visit(0, start_all_gather_rows(rows_R, self.group).wait())

    def sum_gradients(self, rows_R: Tensor, gradient: Callable[[int, Tensor], Tensor]) -> Tensor:
        """See :class:`ContextExchange`."""
        # Gathered again instead of kept: what context parallelism saves is activations between the passes.
        grad = gradient(0, start_all_gather_rows(rows_R, self.group).wait())
        return start_reduce_scatter_rows(grad.to(rows_R.dtype), self.group).wait()


@dataclass(frozen=True, eq=False)
class RingExchange:
    """One block after the other, each from the rank before this one.

    Attributes:
        group: The ranks, in the order of the ring.
        rank: This rank among them.
        size: Their number, at least 2.
    """

    group: ProcessGroup
    rank: int
    size: int

    @property
    def is_ring(self) -> bool:
        """See :class:`ContextExchange`."""
        return True

    def visit_all(self, rows_R: Tensor, visit: Callable[[int, Tensor], None]) -> None:
        """See :class:`ContextExchange`."""
        for step in range(self.size):
            coming = self._pass_on(rows_R, _ROWS) if step < self.size - 1 else None
            visit(step, rows_R)
            if coming is not None:
                rows_R = coming.wait()

    def sum_gradients(self, rows_R: Tensor, gradient: Callable[[int, Tensor], Tensor]) -> Tensor:
        """See :class:`ContextExchange`."""
        travelling: _Passing | None = None
        for step in range(self.size):
            coming = self._pass_on(rows_R, _ROWS) if step < self.size - 1 else None
            grad = gradient(step, rows_R)
            if travelling is not None:
                # What the ranks that had these rows before found travels one step behind them.
                grad = grad + travelling.wait()
            travelling = self._pass_on(grad.to(rows_R.dtype), _GRADIENTS)
            if coming is not None:
                rows_R = coming.wait()
        assert travelling is not None
        return travelling.wait()

    def _pass_on(self, rows_R: Tensor, tag: int) -> _Passing:
        """Start to send rows to the next rank and to receive as many from the one before."""
        rows_R = rows_R.contiguous()
        received = torch.empty_like(rows_R)
        following, preceding = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, rows_R, group=self.group, tag=tag, group_peer=following),
                dist.P2POp(dist.irecv, received, group=self.group, tag=tag, group_peer=preceding),
            ]
        )
        return _Passing(rows_R, received, works)


# Rows and gradients are under way between the same ranks at the same time. NCCL pairs them by their order.
_ROWS, _GRADIENTS = 0, 1


@dataclass(frozen=True, eq=False)
class _Passing:
    """Rows under way; holds those that are sent until they are gone."""

    sent: Tensor
    received: Tensor
    works: list[Any]

    def wait(self) -> Tensor:
        """Return what came. On a GPU the present stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.received
