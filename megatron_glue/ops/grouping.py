"""Grouping of (token, choice) pairs by expert: the index work of an MoE layer, done once.

``one-pass`` counts and orders all pairs together: one histogram gives counts, grouped-GEMM offsets and all-to-all
splits, one stable sort of narrow keys gives the permutation. ``loop`` finds the pairs of each expert with a mask of its
own, as common stacks do; it is the baseline of the benchmarks and the oracle of the tests.

On a CPU the one pass runs in NumPy, whose stable sort of 8- and 16-bit keys is a radix sort (about 8x faster than
torch's stable sort there). Elsewhere it runs in torch, without an operator that makes the host wait.

Stands between the router's choice and the dispatcher. It sees no activations and talks to no other rank.

Shape suffixes: T tokens, K top-k, N = T*K pairs, E experts, P expert-parallel ranks, Q replicas (ranks that split each
expert between them).
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_glue.ops.host_reader import HostReader
from megatron_glue.types import ReplicatedGroups, TokenGroups


class GroupPairs(Protocol):
    """A one-pass grouping from another room, with the values of this file's own."""

    def __call__(self, ids_N: Tensor, num_experts: int, num_ranks: int, top_k: int) -> TokenGroups:
        """Group pairs.

        Args:
            ids_N: int64 expert of each pair, sentinels included.
            num_experts: E.
            num_ranks: P, a divisor of E.
            top_k: K.

        Returns:
            The groups.
        """
        ...


GroupingMethod = Literal["one-pass", "loop"]
GroupingImplementation = Literal["auto", "numpy", "torch"] | GroupPairs


def group_tokens(
    expert_ids_TK: Tensor,
    num_experts: int,
    *,
    num_ranks: int = 1,
    method: GroupingMethod = "one-pass",
    implementation: GroupingImplementation = "auto",
    host_reader: HostReader | None = None,
) -> TokenGroups:
    """Order all (token, choice) pairs by expert, ties by pair number.

    Args:
        expert_ids_TK: [T, K], or [T] for K = 1. Any integer dtype. Ids below 0 or at least ``num_experts`` are
            sentinels: their pairs stand behind all others and belong to no expert.
        num_experts: E.
        num_ranks: P, a divisor of E. Rank p owns experts p*E/P ... (p+1)*E/P - 1.
        method: ``one-pass`` or ``loop``; both give equal values.
        implementation: Of ``one-pass``: ``numpy`` (CPU tensors only), ``torch`` (any device), ``auto``, or a function
            that takes their place.
        host_reader: Counts the reads that ``loop`` makes, one per expert.

    Returns:
        The groups, all int64, on the device of ``expert_ids_TK``.

    Raises:
        ValueError: On a non-integer dtype, a wrong number of dims, no experts, or experts that ranks cannot share.
    """
    if expert_ids_TK.dim() not in (1, 2) or (expert_ids_TK.shape[-1:] == (0,) and expert_ids_TK.dim() == 2):
        raise ValueError(f"expert_ids_TK has shape {tuple(expert_ids_TK.shape)}; expected [T, K] with K >= 1, or [T]")
    if expert_ids_TK.is_floating_point() or expert_ids_TK.is_complex() or expert_ids_TK.dtype == torch.bool:
        raise ValueError(f"expert_ids_TK has dtype {expert_ids_TK.dtype}; expected an integer dtype")
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts}: must be at least 1")
    if num_ranks < 1 or num_experts % num_ranks:
        raise ValueError(f"num_ranks={num_ranks}: must divide the {num_experts} experts")
    top_k = expert_ids_TK.shape[1] if expert_ids_TK.dim() == 2 else 1
    ids_N = expert_ids_TK.detach().reshape(-1).to(torch.int64)
    if method == "loop":
        order_N, counts_E = _order_by_loop(ids_N, num_experts, host_reader or HostReader())
        inverse_N = inverse_permutation(order_N)
    elif not isinstance(implementation, str):
        return implementation(ids_N, num_experts, num_ranks, top_k)
    elif implementation == "numpy" or (implementation == "auto" and ids_N.device.type == "cpu"):
        order_N, inverse_N, counts_E = _order_by_numpy(ids_N, num_experts)
    else:
        order_N, counts_E = _order_by_torch(ids_N, num_experts)
        inverse_N = inverse_permutation(order_N)
    return TokenGroups(
        order_N=order_N,
        inverse_N=inverse_N,
        counts_E=counts_E,
        offsets_E=counts_E.cumsum(0),
        rank_splits_P=counts_E.view(num_ranks, -1).sum(1),
        top_k=top_k,
    )


def replicate_groups(groups: TokenGroups, num_replicas: int) -> ReplicatedGroups:
    """Give each pair Q rows, for Q ranks that hold a part of its expert each; by arithmetic, without another sort.

    Rows for rank (p, q), q inner, are those for p, in their order: each of the Q blocks is the one block of ``groups``,
    shifted.

    Args:
        groups: Grouping of N pairs by experts of P ranks, without sentinels.
        num_replicas: Q.

    Returns:
        The grouping of N * Q pairs for P * Q ranks.
    """
    num_ranks = groups.rank_splits_P.shape[0]
    splits_P1 = groups.rank_splits_P[:, None]
    starts_P1 = splits_P1.cumsum(0) - splits_P1
    replicas_Q = torch.arange(num_replicas, device=splits_P1.device)
    shift_PQ = starts_P1 * (num_replicas - 1) + replicas_Q * splits_P1
    shift_NQ = torch.repeat_interleave(shift_PQ, groups.rank_splits_P, dim=0, output_size=groups.num_pairs)
    rows_NQ = torch.arange(groups.num_pairs, device=splits_P1.device)[:, None] + shift_NQ
    inverse = rows_NQ.index_select(0, groups.inverse_N).view(-1)
    order = inverse_permutation(inverse)
    pair_S = torch.div(order, num_replicas, rounding_mode="floor")
    counts = groups.counts_E.view(num_ranks, 1, -1).expand(-1, num_replicas, -1).reshape(-1)
    replicated = TokenGroups(
        order_N=order,
        inverse_N=inverse,
        counts_E=counts,
        offsets_E=counts.cumsum(0),
        rank_splits_P=splits_P1.expand(-1, num_replicas).reshape(-1),
        top_k=groups.top_k * num_replicas,
    )
    return ReplicatedGroups(replicated, rows_NQ, groups.inverse_N.index_select(0, pair_S))


def reorder_experts(groups: TokenGroups, experts_E: Tensor) -> tuple[TokenGroups, Tensor]:
    """Put the rows of experts into another order of experts; by arithmetic, without another sort.

    Args:
        groups: Grouping of N pairs, without sentinels.
        experts_E: int64. Expert that comes at each place, each one once.

    Returns:
        groups: The same pairs in the new order, which counts and offsets follow; each rank's pairs are as many as
            before, but need not stand together.
        rows_N: int64. Row of the old grouping that stands at each row of the new one.
    """
    counts_E = groups.counts_E.index_select(0, experts_E)
    offsets_E = counts_E.cumsum(0)
    shift_E = (groups.offsets_E - groups.counts_E).index_select(0, experts_E) - (offsets_E - counts_E)
    rows_N = torch.repeat_interleave(shift_E, counts_E, output_size=groups.num_pairs)
    rows_N += torch.arange(groups.num_pairs, device=rows_N.device)
    order_N = groups.order_N.index_select(0, rows_N)
    inverse_N = inverse_permutation(order_N)
    return TokenGroups(order_N, inverse_N, counts_E, offsets_E, groups.rank_splits_P, groups.top_k), rows_N


def inverse_permutation(order_N: Tensor) -> Tensor:
    """Inverse of a permutation.

    Args:
        order_N: int64, each of 0 ... N - 1 once.

    Returns:
        int64 [N]: where each of them stands.
    """
    rows_N = torch.arange(order_N.shape[0], device=order_N.device)
    return torch.empty_like(order_N).scatter_(0, order_N, rows_N)


def count_ids(ids: Tensor, num_ids: int) -> Tensor:
    """Histogram of ids without a host read (``torch.bincount`` makes one, even with a ``minlength``).

    Args:
        ids: int64 of any shape, each in [0, num_ids).
        num_ids: Number of bins.

    Returns:
        int64 [num_ids], on the device of ``ids``. Integer sums, so any order of adding gives the same.
    """
    flat_ids = ids.reshape(-1)
    counts = torch.zeros(num_ids, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, flat_ids, torch.ones_like(flat_ids))


def _order_by_numpy(ids_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order, inverse and counts on a CPU; the tensors share memory with the arrays."""
    # Read as unsigned, every sentinel is at least E; the minimum gathers them under the one key E.
    keys_N = np.minimum(ids_N.numpy().view(np.uint64), num_experts)
    narrow_keys_N = keys_N.astype(np.min_scalar_type(num_experts))
    counts = np.bincount(narrow_keys_N, minlength=num_experts + 1)[:num_experts].astype(np.int64, copy=False)
    order_N = np.argsort(narrow_keys_N, kind="stable").astype(np.int64, copy=False)
    inverse_N = np.empty_like(order_N)
    inverse_N[order_N] = np.arange(len(order_N))
    return torch.from_numpy(order_N), torch.from_numpy(inverse_N), torch.from_numpy(counts)


def _order_by_torch(ids_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Order and counts on any device, without a host read: no bincount, no nonzero, no boolean index."""
    is_sentinel_N = (ids_N < 0) | (ids_N >= num_experts)
    keys_N = ids_N.masked_fill(is_sentinel_N, num_experts)
    counts = count_ids(keys_N, num_experts + 1)
    # A radix sort works through the bits of its keys, so narrow keys take fewer passes.
    order_N = torch.sort(keys_N.to(_narrow_dtype(num_experts)), stable=True).indices
    return order_N, counts[:num_experts]


def _narrow_dtype(largest_key: int) -> torch.dtype:
    for dtype in (torch.uint8, torch.int16, torch.int32):
        if largest_key <= torch.iinfo(dtype).max:
            return dtype
    return torch.int64


def _order_by_loop(ids_N: Tensor, num_experts: int, host_reader: HostReader) -> tuple[Tensor, Tensor]:
    """Order and counts from one mask per expert; each ``where`` makes the host wait for its size."""
    parts = [host_reader.where(ids_N == expert)[0] for expert in range(num_experts)]
    sizes = [part.shape[0] for part in parts]
    parts.append(host_reader.where((ids_N < 0) | (ids_N >= num_experts))[0])
    return torch.cat(parts), torch.tensor(sizes, dtype=torch.int64, device=ids_N.device)
