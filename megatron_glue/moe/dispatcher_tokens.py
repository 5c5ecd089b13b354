"""Experts shared by ranks, one row per token: whole tokens come to the ranks of their experts.

A token's choice and weights travel with it, and each rank groups what arrived by its own experts; pairs of other ranks'
experts are sentinels. Experts are computed, weighted and added up per token where they live, and what goes back is one
partial sum per token and rank. How tokens travel is a :class:`TokenExchange`:

- :class:`GatheredTokens`: all ranks' tokens to all ranks, and the sum of their results back by a reduce-scatter. Sizes
  are those of the residual stream, so the host reads nothing and no rank waits for another's counts. The price is that
  a rank holds P times the tokens, and rows for all their pairs, whether or not its experts were chosen: for few ranks,
  few experts per token left out, or experts that are split over ranks, which need every token anyway.
- ``dispatcher_deepep.py``: each token once to each rank that it needs.

Shape suffixes: T tokens, D model, K top-k, B brought tokens, R rows = B*K pairs, P ranks, E experts, e local experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_glue.backends.permutation import TORCH_PERMUTATION, RowPermutation
from megatron_glue.moe.dispatcher import Dispatch, GroupTokens, RoutedTokens, SplitExperts
from megatron_glue.ops.grouping import count_ids
from megatron_glue.parallel.collectives import Pending, start_all_gather_rows
from megatron_glue.parallel.row_exchange import RowGather, RowScatter
from megatron_glue.types import DispatchLayout, TokenGroups, TokenMetadata


@dataclass(frozen=True, eq=False)
class BroughtTokens:
    """Tokens that came to this rank.

    Attributes:
        x_BD: Their rows.
        weights_BK: fp32. Weights of their choices.
        local_ids_BK: Their choices as ids of this rank's experts; any id outside [0, e) is another rank's. ``None``
            where metadata is reused.
        handle: What the exchange needs to be repeated.
    """

    x_BD: Tensor
    weights_BK: Tensor
    local_ids_BK: Tensor | None
    handle: Any = None


class TokenExchange(ABC):
    """Tokens of one micro-batch on their way to the ranks of their experts, and back."""

    @abstractmethod
    def send(self) -> None:
        """Put tokens on their way."""

    @abstractmethod
    def receive(self) -> BroughtTokens:
        """Wait for what other ranks sent. Differentiable."""

    @abstractmethod
    def bring_back(self, partial_BD: Tensor) -> Tensor:
        """Add up over ranks what they computed for each token.

        Args:
            partial_BD: This rank's part of the sum for each brought token.

        Returns:
            [T, D] for this rank's own tokens. Differentiable.
        """


StartExchange = Callable[[RoutedTokens, TokenMetadata | None], TokenExchange]
"""(this rank's tokens, metadata to reuse) -> the exchange."""


class TokenDispatcher:
    """See the text of this file.

    Args:
        num_experts: E.
        num_local_experts: e.
        exchange: Starts an exchange of tokens.
        permutation: Moves rows into expert order and back.
    """

    is_local = False

    def __init__(
        self,
        num_experts: int,
        num_local_experts: int,
        exchange: StartExchange,
        permutation: RowPermutation = TORCH_PERMUTATION,
    ) -> None:
        self._num_experts = num_experts
        self._num_local_experts = num_local_experts
        self._exchange = exchange
        self._permutation = permutation

    def begin(
        self,
        tokens: RoutedTokens,
        group_tokens: GroupTokens,
        reuse: DispatchLayout | None = None,
    ) -> Dispatch:
        """See :class:`~megatron_glue.moe.dispatcher.Dispatcher`."""
        assert reuse is None or isinstance(reuse, TokenMetadata), "a layer keeps its dispatcher"
        counts_E = reuse.counts_E if reuse else count_ids(tokens.expert_ids_TK, self._num_experts)
        return _TokenDispatch(
            self._exchange(tokens, reuse),
            lambda local_ids_BK: group_tokens(local_ids_BK, self._num_local_experts, 1),
            counts_E,
            reuse,
            self._permutation,
        )


class _TokenDispatch(Dispatch):
    def __init__(
        self,
        exchange: TokenExchange,
        group_local: Callable[[Tensor], TokenGroups],
        counts_E: Tensor,
        metadata: TokenMetadata | None,
        permutation: RowPermutation,
    ) -> None:
        self.counts_E = counts_E
        self._exchange = exchange
        self._group_local = group_local
        self._metadata = metadata
        self._permutation = permutation

    def send(self) -> None:
        """See :class:`Dispatch`."""
        self._exchange.send()

    def run(self, split_experts: SplitExperts) -> Tensor:
        """See :class:`Dispatch`."""
        brought = self._exchange.receive()
        if self._metadata is None:
            assert brought.local_ids_BK is not None, "choices come with the tokens of a first dispatch"
            groups = self._group_local(brought.local_ids_BK)
            self._metadata = TokenMetadata(self.counts_E, groups, brought.handle)
        groups = self._metadata.groups
        rows_RD = self._permutation.permute_rows(brought.x_BD, groups)
        (compute,) = split_experts([groups.num_experts], rows_RD.dtype)
        y_RD = compute(rows_RD, groups.counts_E)
        return self._exchange.bring_back(self._permutation.unpermute_rows(y_RD, groups, brought.weights_BK))

    @property
    def metadata(self) -> TokenMetadata:
        """See :class:`Dispatch`; known once the dispatch has run."""
        assert self._metadata is not None, "the grouping is known once tokens have arrived"
        return self._metadata


class GatheredTokens(TokenExchange):
    """All tokens to all ranks.

    Rows of padding make every rank bring as many; their choice is no expert.

    Args:
        tokens: This rank's tokens.
        reuse: Metadata of the same choice: only rows and weights are gathered.
        group: The ranks.
        first_expert: Global id of this rank's first expert.
    """

    def __init__(
        self, tokens: RoutedTokens, reuse: TokenMetadata | None, group: ProcessGroup, first_expert: int
    ) -> None:
        self._num_tokens = tokens.x_TD.shape[0]
        self._x_TD = pad_rows(tokens.x_TD, tokens.num_rows)
        self._weights_TK = pad_rows(tokens.weights_TK, tokens.num_rows)
        self._group = group
        self._first_expert = first_expert
        self._ids: Pending | None = None
        if reuse is None:
            self._ids = start_all_gather_rows(pad_rows(tokens.expert_ids_TK, tokens.num_rows, value=-1), group)
        self._gathers = (RowGather(group), RowGather(group))

    def send(self) -> None:
        """See :class:`TokenExchange`."""
        self._arriving = [
            gather.start(rows) for gather, rows in zip(self._gathers, (self._weights_TK, self._x_TD), strict=True)
        ]

    def receive(self) -> BroughtTokens:
        """See :class:`TokenExchange`."""
        local_ids_BK = None if self._ids is None else self._ids.wait() - self._first_expert
        weights_BK, x_BD = (
            gather.finish(arriving) for gather, arriving in zip(self._gathers, self._arriving, strict=True)
        )
        del self._arriving
        return BroughtTokens(x_BD, weights_BK, local_ids_BK)

    def bring_back(self, partial_BD: Tensor) -> Tensor:
        """See :class:`TokenExchange`."""
        back = RowScatter(self._group)
        return back.finish(back.start(partial_BD))[: self._num_tokens]


def pad_rows(rows_TX: Tensor, num_rows: int, value: int = 0) -> Tensor:
    """Append rows of a constant.

    Args:
        rows_TX: [T, X].
        num_rows: Rows to have then, at least T.
        value: The constant.

    Returns:
        [num_rows, X]; ``rows_TX`` itself where nothing is missing. Differentiable.
    """
    num_missing = num_rows - rows_TX.shape[0]
    return F.pad(rows_TX, (0, 0, 0, num_missing), value=value) if num_missing else rows_TX


def all_gather_dispatcher(
    group: ProcessGroup,
    num_experts: int,
    num_replicas: int = 1,
    permutation: RowPermutation = TORCH_PERMUTATION,
) -> TokenDispatcher:
    """Build the dispatcher that gathers all tokens.

    Args:
        group: The ranks; those that hold parts of the same experts stand next to each other.
        num_experts: E.
        num_replicas: Ranks that hold a part of the same experts.
        permutation: Moves rows into expert order and back.

    Returns:
        The dispatcher.

    Raises:
        ValueError: If the ranks cannot share the experts.
    """
    num_ranks, rest = divmod(group.size(), num_replicas)
    if rest or num_experts % num_ranks:
        raise ValueError(
            f"group of {group.size()} ranks: cannot share {num_experts} experts evenly, "
            f"with {num_replicas} ranks for each"
        )
    num_local = num_experts // num_ranks
    first_expert = group.rank() // num_replicas * num_local
    return TokenDispatcher(
        num_experts,
        num_local,
        lambda tokens, reuse: GatheredTokens(tokens, reuse, group, first_expert),
        permutation,
    )
