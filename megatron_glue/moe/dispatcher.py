"""How rows get to their experts and back: inside one rank, or over expert-parallel ranks.

Both dispatchers start from one :class:`TokenGroups` and never sort again. Over ranks, rows in expert order already are
in rank order, because rank p owns a contiguous range of experts; the splits are sums of the same histogram. Received
rows come by (source rank, expert) and experts want (expert, source rank): that regrouping follows by arithmetic from
the [P, e] matrix of exchanged counts.

A layer is dropless: every pair has an expert, so no row stands past the last offset. Dispatchers keep no state between
calls: what ``combine`` needs is returned by ``dispatch``, and so is what a recompute of the layer reuses.

Stands between the router and the experts, and again behind the experts.

Shape suffixes: T tokens, D model, K top-k, N = T*K pairs, R received rows, P expert-parallel ranks, E experts, e local
experts.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_glue.ops.host_reader import HostReader
from megatron_glue.ops.permute import gather_rows, permute_rows, unpermute_rows
from megatron_glue.parallel.collectives import all_to_all_equal, all_to_all_rows
from megatron_glue.types import DispatchMetadata, TokenGroups


class Dispatcher(Protocol):
    """Brings rows to experts and results back."""

    @property
    def num_ranks(self) -> int:
        """P, the ranks that share the experts."""
        ...

    def dispatch(
        self, x_TD: Tensor, groups: TokenGroups, reuse: DispatchMetadata | None = None
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """Bring each token's row to its K experts.

        Args:
            x_TD: This rank's tokens.
            groups: Their grouping over all experts, with splits for ``num_ranks`` ranks.
            reuse: The metadata of an earlier dispatch of the same groups: nothing is exchanged but rows.

        Returns:
            x_RD: Rows ordered by local expert. Differentiable.
            counts_e: int64 rows of each local expert.
            metadata: What :meth:`combine` needs.
        """
        ...

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata, weights_TK: Tensor) -> Tensor:
        """Bring results back and add up each token's K, weighted.

        Args:
            y_RD: Results in the order of the dispatched rows.
            metadata: From :meth:`dispatch`.
            weights_TK: Weights of the choices.

        Returns:
            [T, D]. Differentiable with respect to results and weights.
        """
        ...


class LocalDispatcher:
    """All experts on this rank: no collective, no host read."""

    num_ranks = 1

    def dispatch(
        self, x_TD: Tensor, groups: TokenGroups, reuse: DispatchMetadata | None = None
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """See :class:`Dispatcher`."""
        metadata = reuse or DispatchMetadata(
            groups=groups,
            send_splits=None,
            receive_splits=None,
            regroup_R=None,
            regroup_inverse_R=None,
            counts_e=groups.counts_E,
        )
        return permute_rows(x_TD, groups, has_sentinels=False), metadata.counts_e, metadata

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata, weights_TK: Tensor) -> Tensor:
        """See :class:`Dispatcher`."""
        return unpermute_rows(y_RD, metadata.groups, weights_TK, has_sentinels=False)


class AllToAllDispatcher:
    """Experts shared by the ranks of a group: one exchange of counts, one of rows each way.

    The splits of the row exchange must be known on the host: one read per dispatch, after the rows were permuted, and
    none when metadata is reused.

    Args:
        group: The expert-parallel ranks.
        host_reader: Counts the read.
    """

    def __init__(self, group: ProcessGroup, host_reader: HostReader) -> None:
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        self._host_reader = host_reader

    def dispatch(
        self, x_TD: Tensor, groups: TokenGroups, reuse: DispatchMetadata | None = None
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """See :class:`Dispatcher`."""
        counts_Pe = None if reuse else all_to_all_equal(groups.counts_E.view(self.num_ranks, -1), self.group)
        rows_ND = permute_rows(x_TD, groups, has_sentinels=False)
        metadata = reuse or self._plan(groups, counts_Pe)
        rows_RD = all_to_all_rows(rows_ND, metadata.send_splits, metadata.receive_splits, self.group)
        if metadata.regroup_R is not None:
            assert metadata.regroup_inverse_R is not None, "a permutation comes with its inverse"
            rows_RD = gather_rows(rows_RD, metadata.regroup_R, metadata.regroup_inverse_R)
        return rows_RD, metadata.counts_e, metadata

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata, weights_TK: Tensor) -> Tensor:
        """See :class:`Dispatcher`."""
        if metadata.regroup_R is not None:
            assert metadata.regroup_inverse_R is not None, "a permutation comes with its inverse"
            y_RD = gather_rows(y_RD, metadata.regroup_inverse_R, metadata.regroup_R)
        y_ND = all_to_all_rows(y_RD, metadata.receive_splits, metadata.send_splits, self.group)
        return unpermute_rows(y_ND, metadata.groups, weights_TK, has_sentinels=False)

    def _plan(self, groups: TokenGroups, counts_Pe: Tensor | None) -> DispatchMetadata:
        """Splits on the host and the regrouping on the device, from the counts that all ranks exchanged."""
        assert counts_Pe is not None, "counts are exchanged unless metadata is reused"
        send_splits, receive_splits = self._host_reader.read(torch.stack((groups.rank_splits_P, counts_Pe.sum(1))))
        regroup_R, regroup_inverse_R = regrouping(counts_Pe, sum(receive_splits))
        return DispatchMetadata(
            groups=groups,
            send_splits=tuple(send_splits),
            receive_splits=tuple(receive_splits),
            regroup_R=regroup_R,
            regroup_inverse_R=regroup_inverse_R,
            counts_e=counts_Pe.sum(0),
        )


def regrouping(counts_Pe: Tensor, num_rows: int) -> tuple[Tensor | None, Tensor | None]:
    """The permutation from (source rank, expert) order to (expert, source rank) order, without a sort.

    Rows of one (rank, expert) block stay together, so each row moves by its block's shift: the difference of the
    block's starts in the two orders, which are running sums of the counts in row-major and column-major order.

    Args:
        counts_Pe: int64 rows received from each rank for each local expert.
        num_rows: R, their sum (host integer, so that nothing waits for it).

    Returns:
        regroup_R: int64, received row that stands at each regrouped row; ``None`` if the orders are the same.
        inverse_R: int64, its inverse; ``None`` likewise.
    """
    num_ranks, num_local_experts = counts_Pe.shape
    if num_ranks == 1 or num_local_experts == 1:
        return None, None
    by_expert = counts_Pe.t().reshape(-1)
    by_rank = counts_Pe.reshape(-1)
    start_by_expert_Pe = (by_expert.cumsum(0) - by_expert).view(num_local_experts, num_ranks).t()
    start_by_rank_Pe = (by_rank.cumsum(0) - by_rank).view(num_ranks, num_local_experts)
    shift_Pe = start_by_rank_Pe - start_by_expert_Pe
    rows_R = torch.arange(num_rows, device=counts_Pe.device)
    regroup_R = rows_R + torch.repeat_interleave(shift_Pe.t().reshape(-1), by_expert, output_size=num_rows)
    inverse_R = rows_R - torch.repeat_interleave(shift_Pe.reshape(-1), by_rank, output_size=num_rows)
    return regroup_R, inverse_R
