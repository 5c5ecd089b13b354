"""What context-parallel ranks plan to compute, pair by pair."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_glue.backends.attention_context_metadata import Block, VarlenBlock, build_context
from megatron_glue.types import PackedSequence
from tests.support.operator_watch import OperatorWatch

Pair = tuple[int, int]


def rows_of(rows: slice | Tensor) -> list[int]:
    return list(range(rows.start, rows.stop)) if isinstance(rows, slice) else rows.tolist()


def pairs_of_block(block: Block) -> list[Pair]:
    """(query row, key row) of all pairs that a block leaves visible."""
    queries, keys = rows_of(block.query_rows), rows_of(block.key_rows)
    num_queries, num_keys = len(queries) // block.num_pieces, len(keys) // block.num_pieces
    pairs = []
    for piece in range(block.num_pieces):
        for i in range(num_queries):
            for j in range(num_keys):
                hidden = (block.is_causal and j > i) or (block.bias_LK is not None and block.bias_LK[i, j] < 0)
                if not hidden:
                    pairs.append((queries[piece * num_queries + i], keys[piece * num_keys + j]))
    return pairs


def pairs_of_varlen(block: VarlenBlock) -> list[Pair]:
    """Likewise, by the rule of the kernel: the last query at the last key."""
    queries, keys = rows_of(block.query_rows), rows_of(block.key_rows)
    q_edges, k_edges = block.cu_seqlens_q.tolist(), block.cu_seqlens_k.tolist()
    assert (q_edges[-1], k_edges[-1]) == (len(queries), len(keys))
    pairs = []
    for piece in range(len(q_edges) - 1):
        num_queries, num_keys = q_edges[piece + 1] - q_edges[piece], k_edges[piece + 1] - k_edges[piece]
        assert 1 <= num_queries <= block.max_seqlen_q
        assert 1 <= num_keys <= block.max_seqlen_k
        for i in range(num_queries):
            for j in range(num_keys):
                ahead = i + num_keys - num_queries - j
                if not block.is_causal or (ahead >= 0 and (not block.window or ahead < block.window)):
                    pairs.append((queries[q_edges[piece] + i], keys[k_edges[piece] + j]))
    return pairs


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.integers(1, 20), max_size=5),
    st.sampled_from([(2, 4), (2, 8), (3, 6), (4, 8)]),
    st.integers(0, 25),
    st.booleans(),
    st.booleans(),
)
def test_all_ranks_together_plan_every_visible_pair_once(
    lengths: list[int], ranks: tuple[int, int], window: int, is_ring: bool, is_varlen: bool
) -> None:
    size, alignment = ranks
    places = sum(-(-length // alignment) * alignment for length in lengths) + alignment
    whole = PackedSequence.from_lengths(lengths, places - sum(lengths))
    found: Counter[Pair] = Counter()
    for rank in range(size):
        part = whole.shard(rank, size, alignment)
        metadata = build_context(part, window, is_ring=is_ring, is_varlen=is_varlen)
        assert len(metadata.steps) == len(metadata.key_tokens) == (size if is_ring else 1)
        visited: set[int] = set()
        for blocks, key_tokens in zip(metadata.steps, metadata.key_tokens, strict=True):
            assert len(key_tokens) == metadata.num_exchanged_rows * (1 if is_ring else size)
            for block in blocks:
                rows = rows_of(block.query_rows)
                # Each row once in a block, and new exactly the first time.
                assert len(set(rows)) == len(rows)
                assert len(set(rows_of(block.key_rows))) == len(rows_of(block.key_rows))
                assert all((row not in visited) == block.is_new for row in rows)
                visited.update(rows)
                pairs = pairs_of_block(block) if isinstance(block, Block) else pairs_of_varlen(block)
                # No query of a block is without a key: its softmax would be over nothing.
                assert {query for query, _ in pairs} == set(rows)
                found.update((int(metadata.query_tokens_V[q]), int(key_tokens[k])) for q, k in pairs)
        assert visited == set(range(part.num_valid_tokens))
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    expected = Counter(
        (start + query, start + key)
        for start, length in zip(starts, lengths, strict=True)
        for query in range(length)
        for key in range(query + 1)
        if not window or query - key < window
    )
    assert found == expected


def test_f4_f23_a_window_does_not_reach_into_the_document_before() -> None:
    part = PackedSequence.from_lengths([64, 64]).shard(0, 2, 4)
    for is_ring in (False, True):
        metadata = build_context(part, 16, is_ring=is_ring, is_varlen=False)
        pairs = [
            (int(metadata.query_tokens_V[q]), int(tokens[k]))
            for blocks, tokens in zip(metadata.steps, metadata.key_tokens, strict=True)
            for block in blocks
            if isinstance(block, Block)
            for q, k in pairs_of_block(block)
        ]
        assert {key for query, key in pairs if query == 64} == {64}
        assert {key for query, key in pairs if query == 60} == set(range(45, 61))


def test_f13_f14_odd_documents_are_planned_by_their_real_tokens() -> None:
    whole = PackedSequence.from_lengths([5, 3, 7], 5)
    parts = [whole.shard(rank, 2, 4) for rank in range(2)]
    plans = [build_context(part, 0, is_ring=False, is_varlen=True) for part in parts]
    assert [plan.num_valid_tokens for plan in plans] == [6, 9]
    assert {plan.num_exchanged_rows for plan in plans} == {9}
    early, late = plans[1].steps[0]
    assert isinstance(early, VarlenBlock)
    assert isinstance(late, VarlenBlock)
    assert early.cu_seqlens_q.tolist() == [0, 2, 3, 5]
    assert early.cu_seqlens_k.tolist() == [0, 4, 6, 10]
    assert late.cu_seqlens_q.tolist() == [0, 1, 2, 4]
    assert late.cu_seqlens_k.tolist() == [0, 5, 8, 14]


@pytest.mark.parametrize("is_ring", [False, True])
@pytest.mark.parametrize("is_varlen", [False, True])
def test_f25_indices_reach_the_device_in_one_copy_without_a_read(is_ring: bool, is_varlen: bool) -> None:
    part = PackedSequence.from_lengths([40, 1, 33, 8], 42).shard(1, 2, 8)
    with OperatorWatch() as watch:
        build_context(part, 7, is_ring=is_ring, is_varlen=is_varlen)
    assert watch.synchronising == []
    moved = build_context(part.to("meta"), 7, is_ring=is_ring, is_varlen=is_varlen)
    tensors = [
        value
        for blocks in moved.steps
        for block in blocks
        for value in vars(block).values()
        if isinstance(value, torch.Tensor)
    ]
    assert tensors
    assert all(tensor.device.type == "meta" for tensor in (*tensors, *moved.key_tokens, moved.query_tokens_V))


def test_whole_micro_batches_have_no_plan() -> None:
    with pytest.raises(AssertionError, match="needs no exchange"):
        build_context(PackedSequence.from_lengths([8]), 0, is_ring=False, is_varlen=False)
