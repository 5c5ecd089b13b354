"""How rows get to their experts and back: inside one rank, or over the ranks that share the experts.

Both dispatchers start from one :class:`TokenGroups` and never sort again. Over ranks, rows in expert order already are
in rank order, because rank p owns a contiguous range of experts; the splits are sums of the same histogram. Received
rows come by (source rank, expert) and experts want (expert, source rank): that regrouping follows by arithmetic from
the matrix of exchanged counts.

With expert tensor parallelism Q ranks hold a part of the ffn width of the same experts. Each row goes to all Q in the
same exchange, once each, because the collective reads its rows from disjoint places; it is copied there straight from
its token. The Q partial results come back to the sender, who adds them up.

A layer is dropless: every pair has an expert, so no row stands past the last offset. Dispatchers keep no state between
calls: what ``combine`` needs is returned by the dispatch, and so is what a recompute of the layer reuses.

Stands between the router and the experts, and again behind the experts.

Shape suffixes: T tokens, D model, K top-k, N = T*K pairs, R received rows, P ranks of the exchange (expert-parallel
times expert-tensor-parallel ones), E experts, e local experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_glue.ops.grouping import replicate_groups
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.ops.permute import gather_rows, permute_rows, sum_replicas, unpermute_rows
from megatron_glue.parallel.collectives import all_to_all_rows, start_all_to_all_equal
from megatron_glue.parallel.row_exchange import RowExchange
from megatron_glue.types import DispatchMetadata, ReplicatedGroups, TokenGroups


@dataclass(frozen=True, eq=False)
class StartedDispatch:
    """Rows on their way to experts.

    Attributes:
        rows: What :meth:`Dispatcher.finish_dispatch` turns into rows; not to be read.
        exchange: The exchange that they are part of; ``None`` on one rank.
        metadata: What :meth:`Dispatcher.combine` needs.
    """

    rows: Tensor
    exchange: RowExchange | None
    metadata: DispatchMetadata


class Dispatcher(Protocol):
    """Brings rows to experts and results back."""

    @property
    def num_ranks(self) -> int:
        """Ranks that the experts are divided among: each owns a contiguous range of them."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether all experts are here, whole."""
        ...

    def start_dispatch(
        self, x_TD: Tensor, groups: TokenGroups, reuse: DispatchMetadata | None = None
    ) -> StartedDispatch:
        """Start to bring each token's row to its K experts.

        Args:
            x_TD: This rank's tokens.
            groups: Their grouping over all experts, with splits for ``num_ranks`` ranks.
            reuse: The metadata of an earlier dispatch of the same groups: nothing is exchanged but rows.

        Returns:
            What runs now. Whatever is computed before it is finished runs beside the exchange, in backward too.
        """
        ...

    def finish_dispatch(self, started: StartedDispatch) -> Tensor:
        """Wait for the rows.

        Args:
            started: From :meth:`start_dispatch`.

        Returns:
            [R, D] rows ordered by local expert, ``metadata.counts_e`` of each. Differentiable.
        """
        ...

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata, weights_TK: Tensor) -> Tensor:
        """Bring results back and add up each token's K, weighted.

        Args:
            y_RD: Results in the order of the dispatched rows; where experts are split, this rank's share of each sum.
            metadata: Of the dispatch.
            weights_TK: Weights of the choices.

        Returns:
            [T, D]. Differentiable with respect to results and weights.
        """
        ...


class LocalDispatcher:
    """All experts on this rank: no collective, no host read."""

    num_ranks = 1
    is_local = True

    def start_dispatch(
        self, x_TD: Tensor, groups: TokenGroups, reuse: DispatchMetadata | None = None
    ) -> StartedDispatch:
        """See :class:`Dispatcher`; nothing is left to be waited for."""
        metadata = reuse or DispatchMetadata(
            groups=groups,
            send_splits=None,
            receive_splits=None,
            regroup_R=None,
            regroup_inverse_R=None,
            counts_e=groups.counts_E,
        )
        return StartedDispatch(permute_rows(x_TD, groups, has_sentinels=False), None, metadata)

    def finish_dispatch(self, started: StartedDispatch) -> Tensor:
        """See :class:`Dispatcher`."""
        return started.rows

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata, weights_TK: Tensor) -> Tensor:
        """See :class:`Dispatcher`."""
        return unpermute_rows(y_RD, metadata.groups, weights_TK, has_sentinels=False)


class AllToAllDispatcher:
    """Experts shared by the ranks of a group: one exchange of counts, one of rows each way.

    The splits of the row exchange must be known on the host: one read per dispatch, after the rows were permuted, and
    none when metadata is reused. The counts travel while the rows are permuted.

    Args:
        group: The ranks; those that hold parts of the same experts stand next to each other.
        host_reader: Counts the read.
        num_replicas: Ranks that hold a part of the same experts.

    Raises:
        ValueError: If these do not divide the group.
    """

    is_local = False

    def __init__(self, group: ProcessGroup, host_reader: HostReader, num_replicas: int = 1) -> None:
        if group.size() % num_replicas:
            raise ValueError(f"num_replicas={num_replicas}: does not divide the group of {group.size()} ranks")
        self.group = group
        self.num_ranks = group.size() // num_replicas
        self._num_replicas = num_replicas
        self._host_reader = host_reader

    def start_dispatch(
        self, x_TD: Tensor, groups: TokenGroups, reuse: DispatchMetadata | None = None
    ) -> StartedDispatch:
        """See :class:`Dispatcher`."""
        replicated = reuse.replicated if reuse else None
        if reuse is None and self._num_replicas > 1:
            replicated = replicate_groups(groups, self._num_replicas)
        sent = groups if replicated is None else replicated.groups
        counting = None if reuse else start_all_to_all_equal(sent.counts_E.view(self.group.size(), -1), self.group)
        rows = permute_rows(x_TD, sent, has_sentinels=False)
        if counting is None:
            assert reuse is not None, "counts are exchanged unless metadata is reused"
            metadata = reuse
        else:
            metadata = self._plan(groups, replicated, counting.wait())
        assert metadata.send_splits is not None, "an exchange has its splits"
        assert metadata.receive_splits is not None, "an exchange has its splits"
        exchange = RowExchange(metadata.send_splits, metadata.receive_splits, self.group)
        return StartedDispatch(exchange.start(rows), exchange, metadata)

    def finish_dispatch(self, started: StartedDispatch) -> Tensor:
        """See :class:`Dispatcher`."""
        assert started.exchange is not None, "rows were sent by an exchange"
        rows_RD = started.exchange.finish(started.rows)
        metadata = started.metadata
        if metadata.regroup_R is None:
            return rows_RD
        assert metadata.regroup_inverse_R is not None, "a permutation comes with its inverse"
        return gather_rows(rows_RD, metadata.regroup_R, metadata.regroup_inverse_R)

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata, weights_TK: Tensor) -> Tensor:
        """See :class:`Dispatcher`."""
        if metadata.regroup_R is not None:
            assert metadata.regroup_inverse_R is not None, "a permutation comes with its inverse"
            y_RD = gather_rows(y_RD, metadata.regroup_inverse_R, metadata.regroup_R)
        y_ND = all_to_all_rows(y_RD, metadata.receive_splits, metadata.send_splits, self.group)
        if metadata.replicated is not None:
            # Before the weights, so that backward keeps one row of a pair and not one of each part.
            y_ND = sum_replicas(y_ND, metadata.replicated)
        return unpermute_rows(y_ND, metadata.groups, weights_TK, has_sentinels=False)

    def _plan(self, groups: TokenGroups, replicated: ReplicatedGroups | None, counts_Pe: Tensor) -> DispatchMetadata:
        """Splits on the host and the regrouping on the device, from the counts that all ranks exchanged."""
        sent_P = (groups if replicated is None else replicated.groups).rank_splits_P
        send_splits, receive_splits = self._host_reader.read(torch.stack((sent_P, counts_Pe.sum(1))))
        regroup_R, regroup_inverse_R = regrouping(counts_Pe, sum(receive_splits))
        return DispatchMetadata(
            groups=groups,
            send_splits=tuple(send_splits),
            receive_splits=tuple(receive_splits),
            regroup_R=regroup_R,
            regroup_inverse_R=regroup_inverse_R,
            counts_e=counts_Pe.sum(0),
            replicated=replicated,
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
