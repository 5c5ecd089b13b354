"""What ``backends/deepep.py`` calls of the library deep_ep, over gloo, so that everything around it is tested anywhere.

Signatures are the library's, which ``tests/unit/backends/test_deepep.py`` compares where it is installed. Like the
library it sends a token once to each rank, gives ids of other ranks' experts as -1 with weight 0, adds results up
without weights, and takes neither ids nor weights together with a handle.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class _Event:
    def current_stream_wait(self) -> None:
        pass


class Buffer:
    """Stands in for ``deep_ep.Buffer``."""

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes > 0
        self.group = group
        self.num_host_waits = 0

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> _Config:
        return _Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> _Config:
        return _Config()

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        rank_of_TK = torch.div(topk_idx, num_experts // self.group.size(), rounding_mode="floor")
        ranks_P = torch.arange(self.group.size())
        is_in_rank = (rank_of_TK[:, :, None] == ranks_P).any(1)
        to_expert = (topk_idx[:, :, None] == torch.arange(num_experts)).sum((0, 1))
        return is_in_rank.sum(0), None, to_expert, is_in_rank, _Event()

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        async_finish: bool = False,
    ) -> tuple[Any, ...]:
        assert x.is_contiguous()
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            return self._exchange(x[handle[0]], handle[1], handle[2]), None, None, None, None, _Event()
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        self.num_host_waits += 1
        tokens = torch.cat([column.nonzero()[:, 0] for column in is_token_in_rank.unbind(1)])
        send = is_token_in_rank.sum(0)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=self.group)
        handle = (tokens, send.tolist(), receive.tolist(), x.shape[0])
        ids, weights = (self._exchange(each[tokens], handle[1], handle[2]) for each in (topk_idx, topk_weights))
        num_local = num_tokens_per_expert.shape[0] // self.group.size()
        ids = ids - self.group.rank() * num_local
        is_here = (ids >= 0) & (ids < num_local)
        counts = [int((ids == expert).sum()) for expert in range(num_local)]
        received = self._exchange(x[tokens], handle[1], handle[2])
        return received, ids.where(is_here, -1), weights * is_here, counts, handle, _Event()

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, async_finish: bool = False
    ) -> tuple[Any, ...]:
        assert x.is_contiguous()
        tokens, send, receive, num_tokens = handle
        sums = []
        for each in (x, topk_weights):
            if each is None:
                sums.append(None)
                continue
            back = self._exchange(each, receive, send)
            sums.append(back.new_zeros(num_tokens, back.shape[1]).index_add_(0, tokens, back))
        return (*sums, _Event())

    def _exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        received = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=self.group)
        return received


def install() -> None:
    """Make ``import deep_ep`` find the stand-in, in this process."""
    module = ModuleType("deep_ep")
    module.Buffer = Buffer  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = module
