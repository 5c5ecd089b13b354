"""Experts shared by ranks, one row per pair: an exchange of counts, and one or more of rows each way.

Rows in expert order already are in rank order, because rank p owns a contiguous range of experts; the splits are sums
of the same histogram. Received rows come by (source rank, expert) and experts want (expert, source rank): that
regrouping follows by arithmetic from the matrix of exchanged counts.

The splits of the row exchange must be known on the host. Counts are exchanged, summed and copied there while rows are
permuted and, unless it is to run beside the row exchange, the shared expert is computed; the host waits for them last.
A dispatch that reuses metadata exchanges and reads nothing but rows.

With several chunks each exchange carries the rows of some of each rank's experts, and the exchange of the next chunk
runs while one is computed: rows for chunk c + 1 are launched before the experts of chunk c compute, and results of
chunk c travel back while those of chunk c + 1 compute. Autograd runs backward in the mirrored order, so there too each
chunk's gradients travel while another chunk is computed. Chunks are cut by expert and not by token: each expert still
multiplies all its rows in one product, and gradients of weights are not summed over chunks. One grouping, one exchange
of counts and one read serve all of them; the price is one more copy of the results, which chunks return in pieces.

With expert tensor parallelism Q ranks hold a part of the ffn width of the same experts. Each row goes to all Q in the
same exchange, once each, because the collective reads its rows from disjoint places; it is copied there straight from
its token. The Q partial results come back to the sender, who adds them up.

Shape suffixes: T tokens, D model, K top-k, N = T*K pairs, S sent rows, R received rows, P ranks of the exchange
(expert-parallel times expert-tensor-parallel ones), E experts, e local experts, C chunks.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_glue.backends.permutation import TORCH_PERMUTATION, RowPermutation
from megatron_glue.moe.dispatcher import Dispatch, GroupTokens, RoutedTokens, SplitExperts
from megatron_glue.ops.grouping import inverse_permutation, reorder_experts, replicate_groups
from megatron_glue.ops.host_reader import HostReader, PendingRead
from megatron_glue.ops.permute import gather_rows, sum_replicas
from megatron_glue.parallel.collectives import Pending, start_all_to_all_equal
from megatron_glue.parallel.row_exchange import RowExchange
from megatron_glue.types import DispatchLayout, DispatchMetadata, ExchangeLayout, ReplicatedGroups, TokenGroups


class AllToAllDispatcher:
    """See the text of this file.

    Args:
        group: The ranks; those that hold parts of the same experts stand next to each other.
        num_experts: E.
        host_reader: Counts the read of the splits.
        num_replicas: Ranks that hold a part of the same experts.
        num_chunks: Exchanges of rows each way, at most the experts of a rank.
        permutation: Moves rows into expert order and back.

    Raises:
        ValueError: If the ranks cannot share the experts, or the experts of a rank the chunks.
    """

    is_local = False

    def __init__(
        self,
        group: ProcessGroup,
        num_experts: int,
        host_reader: HostReader,
        num_replicas: int = 1,
        num_chunks: int = 1,
        permutation: RowPermutation = TORCH_PERMUTATION,
    ) -> None:
        if group.size() % num_replicas:
            raise ValueError(f"num_replicas={num_replicas}: does not divide the group of {group.size()} ranks")
        self.group = group
        self.num_experts = num_experts
        self.num_ranks = group.size() // num_replicas
        if num_experts % self.num_ranks:
            raise ValueError(f"num_experts={num_experts}: {self.num_ranks} ranks cannot share them evenly")
        num_local = num_experts // self.num_ranks
        if not 1 <= num_chunks <= num_local:
            raise ValueError(f"num_chunks={num_chunks}: a rank has {num_local} experts, and each chunk needs one")
        self.num_replicas = num_replicas
        self.host_reader = host_reader
        self.permutation = permutation
        self.chunk_bounds = [num_local * chunk // num_chunks for chunk in range(num_chunks + 1)]

    @property
    def chunk_sizes(self) -> list[int]:
        """Local experts of each chunk."""
        return [stop - start for start, stop in pairwise(self.chunk_bounds)]

    def begin(
        self,
        tokens: RoutedTokens,
        group_tokens: GroupTokens,
        reuse: DispatchLayout | None = None,
    ) -> Dispatch:
        """See :class:`~megatron_glue.moe.dispatcher.Dispatcher`."""
        if reuse is not None:
            assert isinstance(reuse, DispatchMetadata), "a layer keeps its dispatcher"
            return _AllToAllDispatch(self, tokens, reuse)
        groups = group_tokens(tokens.expert_ids_TK, self.num_experts, self.num_ranks)
        return _AllToAllDispatch(self, tokens, _AllToAllPlan(self, groups))


class _AllToAllPlan:
    """The metadata of a dispatch, as far as it is known: counts are on their way."""

    def __init__(self, dispatcher: AllToAllDispatcher, groups: TokenGroups) -> None:
        self._dispatcher = dispatcher
        replicas = dispatcher.num_replicas
        replicated = replicate_groups(groups, replicas) if replicas > 1 else None
        sent = groups if replicated is None else replicated.groups
        counts_Pe = sent.counts_E.view(dispatcher.group.size(), -1)
        self._counting: Pending = start_all_to_all_equal(counts_Pe, dispatcher.group)
        self._splits: PendingRead = dispatcher.host_reader.start_read(
            lambda: torch.stack([self._sums_CP(counts_Pe), self._sums_CP(self._counting.wait())]), counts_Pe.device
        )
        self.counts_E = groups.counts_E
        self.groups, self.replicated = self._in_chunks(groups, replicated)

    @property
    def sent(self) -> TokenGroups:
        """Grouping of the rows that are sent."""
        return self.groups if self.replicated is None else self.replicated.groups

    def finish(self) -> DispatchMetadata:
        """Wait for the splits on the host, and for the counts on the device."""
        send_CP, receive_CP = self._splits.wait()
        counts_Pe = self._counting.wait()
        exchanges = []
        for chunk, (start, stop) in enumerate(pairwise(self._dispatcher.chunk_bounds)):
            own_Pe = counts_Pe[:, start:stop]
            regroup_R, regroup_inverse_R = regrouping(own_Pe, sum(receive_CP[chunk]))
            exchanges.append(
                ExchangeLayout(
                    send_splits=tuple(send_CP[chunk]),
                    receive_splits=tuple(receive_CP[chunk]),
                    regroup_R=regroup_R,
                    regroup_inverse_R=regroup_inverse_R,
                    counts_e=own_Pe.sum(0),
                )
            )
        return DispatchMetadata(self.counts_E, self.groups, tuple(exchanges), self.replicated)

    def _sums_CP(self, counts_Pe: Tensor) -> Tensor:
        """Rows of each chunk from or for each rank."""
        bounds = pairwise(self._dispatcher.chunk_bounds)
        return torch.stack([counts_Pe[:, start:stop].sum(1) for start, stop in bounds])

    def _in_chunks(
        self, groups: TokenGroups, replicated: ReplicatedGroups | None
    ) -> tuple[TokenGroups, ReplicatedGroups | None]:
        """Put sent rows into the order (chunk, rank, expert)."""
        sizes = self._dispatcher.chunk_sizes
        if len(sizes) == 1:
            return groups, replicated
        num_ranks = self._dispatcher.group.size()
        sent = groups if replicated is None else replicated.groups
        experts_Pe = torch.arange(sent.num_experts, device=sent.order_N.device).view(num_ranks, -1)
        experts_E = torch.cat([part.reshape(-1) for part in experts_Pe.split(sizes, dim=1)])
        reordered, rows_S = reorder_experts(sent, experts_E)
        if replicated is None:
            return reordered, None
        old_rows_NQ = replicated.rows_NQ
        rows_NQ = inverse_permutation(rows_S).index_select(0, old_rows_NQ.view(-1)).view_as(old_rows_NQ)
        return groups, ReplicatedGroups(reordered, rows_NQ, replicated.source_S.index_select(0, rows_S))


class _AllToAllDispatch(Dispatch):
    def __init__(
        self, dispatcher: AllToAllDispatcher, tokens: RoutedTokens, layout: DispatchMetadata | _AllToAllPlan
    ) -> None:
        self.counts_E = layout.counts_E
        self._dispatcher = dispatcher
        self._weights_TK = tokens.weights_TK
        self._layout = layout
        self._rows_SD = dispatcher.permutation.permute_rows(tokens.x_TD, layout.sent, has_sentinels=False)
        self._chunks_SD: list[Tensor] = []
        self._next: _Arriving | None = None

    def send(self) -> None:
        """Launch the exchange of the first chunk."""
        if isinstance(self._layout, _AllToAllPlan):
            self._layout = self._layout.finish()
        sizes = [sum(exchange.send_splits) for exchange in self.metadata.exchanges]
        self._chunks_SD = [self._rows_SD] if len(sizes) == 1 else list(self._rows_SD.split(sizes))
        self._dtype = self._rows_SD.dtype
        del self._rows_SD
        self._next = self._launch(0)

    def run(self, split_experts: SplitExperts) -> Tensor:
        """See :class:`Dispatch`."""
        metadata, group = self.metadata, self._dispatcher.group
        returning: list[_Arriving] = []
        for chunk, compute in enumerate(split_experts(self._dispatcher.chunk_sizes, self._dtype)):
            layout, present = metadata.exchanges[chunk], self._next
            assert present is not None, "rows are sent before they are computed"
            # The next chunk's rows travel while this one's are computed.
            self._next = self._launch(chunk + 1)
            y_RD = compute(_regroup(present.wait(), layout.regroup_R, layout.regroup_inverse_R), layout.counts_e)
            y_RD = _regroup(y_RD, layout.regroup_inverse_R, layout.regroup_R)
            returning.append(_Arriving(RowExchange(layout.receive_splits, layout.send_splits, group), y_RD))
            del present, y_RD
        results = [arriving.wait() for arriving in returning]
        y_SD = results[0] if len(results) == 1 else torch.cat(results)
        if metadata.replicated is not None:
            # Before the weights, so that backward keeps one row of a pair and not one of each part.
            y_SD = sum_replicas(y_SD, metadata.replicated)
        return self._dispatcher.permutation.unpermute_rows(y_SD, metadata.groups, self._weights_TK, has_sentinels=False)

    @property
    def metadata(self) -> DispatchMetadata:
        """See :class:`Dispatch`."""
        assert isinstance(self._layout, DispatchMetadata), "the layout is known once rows were sent"
        return self._layout

    def _launch(self, chunk: int) -> _Arriving | None:
        """Send the rows of a chunk, if there is one."""
        if chunk == len(self._chunks_SD):
            return None
        layout = self.metadata.exchanges[chunk]
        return _Arriving(
            RowExchange(layout.send_splits, layout.receive_splits, self._dispatcher.group), self._chunks_SD[chunk]
        )


class _Arriving:
    """Rows on their way, held no longer than until they have arrived."""

    def __init__(self, exchange: RowExchange, rows: Tensor) -> None:
        self._exchange = exchange
        self._rows: Tensor | None = exchange.start(rows)

    def wait(self) -> Tensor:
        assert self._rows is not None, "rows arrive once"
        rows, self._rows = self._rows, None
        return self._exchange.finish(rows)


def _regroup(rows_RD: Tensor, index_R: Tensor | None, inverse_R: Tensor | None) -> Tensor:
    if index_R is None or inverse_R is None:
        return rows_RD
    return gather_rows(rows_RD, index_R, inverse_R)


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
