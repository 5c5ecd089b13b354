"""Grouping of (token, choice) pairs by expert in four Triton kernels: a stable counting sort without atomics.

1. ``_count_in_blocks`` numbers the pairs of each block among those of the same expert and writes how many pairs of each
   expert the block has.
2. ``_scan_blocks`` turns these counts, expert by expert, into running sums over the blocks.
3. ``_scan_experts`` turns the totals into offsets, and sums them up for each rank.
4. ``_scatter_pairs`` gives each pair its row: start of the expert, plus pairs in earlier blocks, plus its number.

No two programs write to one place and every sum is one of integers, so the result is the same in every run. Nothing
depends on a value that the host would have to read. Work grows with the pairs, not with the experts, except for the
table of counts, which has (E + 1) * N / BLOCK entries. Loops up to a number that is known at the launch only are
``while`` loops: Triton 3.6's interpreter cannot count a ``range`` up to one under NumPy 2.4.

The backend ``triton`` of the role ``grouping``: it stands where ``ops/grouping.py`` groups with torch, gives the same
values and is called by it. It checks no input.

Shape suffixes: N pairs, E experts, P expert-parallel ranks, B blocks of pairs, n pairs of one block, e experts or b
blocks of one tile.
"""

# Triton may be missing where types are checked, and its own types do not know that a launch takes plain numbers.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_glue.types import TokenGroups

PAIRS_PER_BLOCK = 512
_COLUMNS_PER_STEP = 32
_TILE = 1024


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _count_in_blocks(
    ids_ptr, numbers_ptr, table_ptr, num_pairs, num_blocks, num_experts, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """Compare each pair of a block with all of the block, STEP at a time."""
    block = tl.program_id(0).to(tl.int64)
    local_n = tl.arange(0, BLOCK)
    pairs_n = block * BLOCK + local_n
    is_pair_n = pairs_n < num_pairs
    ids_n = tl.load(ids_ptr + pairs_n, mask=is_pair_n, other=0)
    keys_n = tl.where((ids_n < 0) | (ids_n >= num_experts), num_experts, ids_n)
    number_n = tl.zeros([BLOCK], tl.int32)
    total_n = tl.zeros([BLOCK], tl.int32)
    for start in range(0, BLOCK, STEP):
        other_local = start + tl.arange(0, STEP)
        others = block * BLOCK + other_local
        is_other = others < num_pairs
        other_ids = tl.load(ids_ptr + others, mask=is_other, other=0)
        other_keys = tl.where((other_ids < 0) | (other_ids >= num_experts), num_experts, other_ids)
        is_same = (keys_n[:, None] == other_keys[None, :]) & is_other[None, :]
        is_earlier = is_same & (other_local[None, :] < local_n[:, None])
        number_n += tl.sum(is_earlier.to(tl.int32), axis=1)
        total_n += tl.sum(is_same.to(tl.int32), axis=1)
    tl.store(numbers_ptr + pairs_n, number_n, mask=is_pair_n)
    # The last pair of each expert speaks for all of them.
    is_last_n = is_pair_n & (number_n == total_n - 1)
    tl.store(table_ptr + keys_n * num_blocks + block, total_n.to(tl.int64), mask=is_last_n)


@triton.jit(do_not_specialize=["num_blocks"])
def _scan_blocks(table_ptr, counts_ptr, num_blocks, num_experts, TILE: tl.constexpr):
    """Replace one expert's counts by the pairs in earlier blocks; the last row is that of the sentinels."""
    expert = tl.program_id(0).to(tl.int64)
    row_ptr = table_ptr + expert * num_blocks
    num_before = tl.full([], 0, tl.int64)
    start = tl.full([], 0, tl.int64)
    while start < num_blocks:
        blocks_b = start + tl.arange(0, TILE)
        is_block_b = blocks_b < num_blocks
        counts_b = tl.load(row_ptr + blocks_b, mask=is_block_b, other=0)
        tl.store(row_ptr + blocks_b, num_before + tl.cumsum(counts_b, 0) - counts_b, mask=is_block_b)
        num_before += tl.sum(counts_b, 0)
        start += TILE
    tl.store(counts_ptr + expert, num_before, mask=expert < num_experts)


@triton.jit
def _scan_experts(counts_ptr, offsets_ptr, splits_ptr, experts_per_rank, TILE: tl.constexpr):
    """Add up the experts of one rank, behind those of all ranks before it."""
    rank = tl.program_id(0).to(tl.int64)
    first = rank * experts_per_rank
    num_before = tl.full([], 0, tl.int64)
    start = tl.full([], 0, tl.int64)
    while start < first:
        experts_e = start + tl.arange(0, TILE)
        num_before += tl.sum(tl.load(counts_ptr + experts_e, mask=experts_e < first, other=0), 0)
        start += TILE
    split = tl.full([], 0, tl.int64)
    start = tl.full([], 0, tl.int64)
    while start < experts_per_rank:
        experts_e = start + tl.arange(0, TILE)
        is_own_e = experts_e < experts_per_rank
        counts_e = tl.load(counts_ptr + first + experts_e, mask=is_own_e, other=0)
        tl.store(offsets_ptr + first + experts_e, num_before + split + tl.cumsum(counts_e, 0), mask=is_own_e)
        split += tl.sum(counts_e, 0)
        start += TILE
    tl.store(splits_ptr + rank, split)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _scatter_pairs(
    ids_ptr,
    numbers_ptr,
    table_ptr,
    offsets_ptr,
    order_ptr,
    inverse_ptr,
    num_pairs,
    num_blocks,
    num_experts,
    BLOCK: tl.constexpr,
):
    """Write where each pair of a block goes, and at that place which pair it is."""
    block = tl.program_id(0).to(tl.int64)
    pairs_n = block * BLOCK + tl.arange(0, BLOCK)
    is_pair_n = pairs_n < num_pairs
    ids_n = tl.load(ids_ptr + pairs_n, mask=is_pair_n, other=0)
    keys_n = tl.where((ids_n < 0) | (ids_n >= num_experts), num_experts, ids_n)
    start_n = tl.load(offsets_ptr + keys_n - 1, mask=is_pair_n & (keys_n > 0), other=0)
    num_before_n = tl.load(table_ptr + keys_n * num_blocks + block, mask=is_pair_n, other=0)
    number_n = tl.load(numbers_ptr + pairs_n, mask=is_pair_n, other=0)
    rows_n = start_n + num_before_n + number_n
    tl.store(inverse_ptr + pairs_n, rows_n, mask=is_pair_n)
    tl.store(order_ptr + rows_n, pairs_n, mask=is_pair_n)


IS_INTERPRETED = not isinstance(_count_in_blocks, triton.JITFunction)
"""Whether Triton was told to interpret kernels when this file was imported."""


def group_pairs(ids_N: Tensor, num_experts: int, num_ranks: int, top_k: int) -> TokenGroups:
    """Order pairs by expert, ties by pair number, sentinels last.

    A counting sort as in the least-significant-digit radix sorts of GPUs (Satish et al. 2009), with one digit.

    Args:
        ids_N: int64. Expert of each pair; below 0 or at least ``num_experts`` for none.
        num_experts: E.
        num_ranks: P, a divisor of E.
        top_k: K, kept in the result.

    Returns:
        The groups, all int64, on the device of ``ids_N``; bit-equal to those of ``ops.grouping.group_tokens``.
    """
    ids_N = ids_N.contiguous()
    num_pairs = ids_N.shape[0]
    num_blocks = max(1, triton.cdiv(num_pairs, PAIRS_PER_BLOCK))
    numbers_N = ids_N.new_empty(num_pairs, dtype=torch.int32)
    table_EB = ids_N.new_zeros(num_experts + 1, num_blocks)
    order_N, inverse_N = torch.empty_like(ids_N), torch.empty_like(ids_N)
    counts_E, offsets_E = ids_N.new_empty(num_experts), ids_N.new_empty(num_experts)
    splits_P = ids_N.new_empty(num_ranks)
    sizes = (num_pairs, num_blocks, num_experts)
    _count_in_blocks[(num_blocks,)](
        ids_N, numbers_N, table_EB, *sizes, BLOCK=PAIRS_PER_BLOCK, STEP=_COLUMNS_PER_STEP, num_warps=8
    )
    _scan_blocks[(num_experts + 1,)](table_EB, counts_E, num_blocks, num_experts, TILE=_TILE)
    _scan_experts[(num_ranks,)](counts_E, offsets_E, splits_P, num_experts // num_ranks, TILE=_TILE)
    _scatter_pairs[(num_blocks,)](
        ids_N, numbers_N, table_EB, offsets_E, order_N, inverse_N, *sizes, BLOCK=PAIRS_PER_BLOCK
    )
    return TokenGroups(order_N, inverse_N, counts_E, offsets_E, splits_P, top_k)
