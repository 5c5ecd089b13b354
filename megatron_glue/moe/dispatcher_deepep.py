"""Each token once to each rank that holds one of its experts, by DeepEP (``backends/deepep.py``).

Fewer rows travel than with one row per pair, wherever a token chooses several experts of one rank. The host waits once
per layer for the number of tokens, and not at all in a recompute. In forward the shared expert can run beside the
exchange; backward waits for each exchange where it stands.

The rest of the way is that of every dispatch by token, in ``dispatcher_tokens.py``.

Shape suffixes: T tokens, D model, K top-k, B brought tokens, E experts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_glue.backends.deepep import DeepEPBuffers, DispatchedTokens, combine, dispatch, dispatch_again
from megatron_glue.backends.permutation import TORCH_PERMUTATION, RowPermutation
from megatron_glue.moe.dispatcher import RoutedTokens
from megatron_glue.moe.dispatcher_tokens import BroughtTokens, TokenDispatcher, TokenExchange, pad_rows
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.types import TokenMetadata


class DeepEPTokens(TokenExchange):
    """Tokens on their way through DeepEP.

    Args:
        tokens: This rank's tokens.
        reuse: Metadata of the same choice: its handle is used again.
        buffer: A ``deep_ep.Buffer``.
        num_experts: E.
        host_reader: Counts the library's wait for the number of tokens.
    """

    def __init__(
        self,
        tokens: RoutedTokens,
        reuse: TokenMetadata | None,
        buffer: Any,
        num_experts: int,
        host_reader: HostReader,
    ) -> None:
        self._tokens = tokens
        self._reuse = reuse
        self._buffer = buffer
        self._num_experts = num_experts
        self._host_reader = host_reader

    def send(self) -> None:
        """See :class:`TokenExchange`."""
        tokens = self._tokens
        # A rank without tokens brings one that goes nowhere: kernels are launched for a positive number of them.
        num_rows = max(tokens.x_TD.shape[0], 1)
        x_TD, weights_TK = pad_rows(tokens.x_TD, num_rows), pad_rows(tokens.weights_TK, num_rows)
        if self._reuse is not None:
            self._arriving: DispatchedTokens = dispatch_again(self._buffer, x_TD, weights_TK, self._reuse.handle)
            return
        self._host_reader.count_reads_of_library(1)
        ids_TK = pad_rows(tokens.expert_ids_TK, num_rows, value=-1)
        self._arriving = dispatch(self._buffer, x_TD, ids_TK, weights_TK, self._num_experts)

    def receive(self) -> BroughtTokens:
        """See :class:`TokenExchange`."""
        arrived = self._arriving
        arrived.event.current_stream_wait()
        return BroughtTokens(arrived.x_BD, arrived.weights_BK, arrived.local_ids_BK, arrived.layout)

    def bring_back(self, partial_BD: Tensor) -> Tensor:
        """See :class:`TokenExchange`."""
        return combine(self._buffer, partial_BD, self._arriving.layout)[: self._tokens.x_TD.shape[0]]


def deepep_dispatcher(
    group: ProcessGroup,
    num_experts: int,
    host_reader: HostReader,
    buffers: DeepEPBuffers,
    permutation: RowPermutation = TORCH_PERMUTATION,
) -> TokenDispatcher:
    """Build the dispatcher.

    Args:
        group: The ranks, which hold equally many experts each.
        num_experts: E.
        host_reader: Counts the library's waits.
        buffers: Of the model.
        permutation: Moves rows into expert order and back.

    Returns:
        The dispatcher.
    """

    def start(tokens: RoutedTokens, reuse: TokenMetadata | None) -> TokenExchange:
        row_bytes = tokens.x_TD.shape[1] * tokens.x_TD.element_size()
        return DeepEPTokens(tokens, reuse, buffers.of(group, row_bytes), num_experts, host_reader)

    return TokenDispatcher(num_experts, num_experts // group.size(), start, permutation)
