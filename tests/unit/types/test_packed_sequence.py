"""What a layout refuses, and what it says about itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_glue.types import PAD_SEGMENT_ID, PackedSequence


def test_a_layout_of_two_documents_and_padding() -> None:
    sequence = PackedSequence.from_lengths([3, 2], num_pad_tokens=2, position_starts=[0, 7])
    assert sequence.segment_ids_T.tolist() == [0, 0, 0, 1, 1, PAD_SEGMENT_ID, PAD_SEGMENT_ID]
    assert sequence.positions_T.tolist() == [0, 1, 2, 7, 8, 0, 0]
    assert (sequence.num_segments, sequence.num_valid_tokens, sequence.num_tokens, sequence.max_seqlen) == (2, 5, 7, 3)
    assert (sequence.segment_ids_T.dtype, sequence.positions_T.dtype) == (torch.int32, torch.int64)


def test_empty_segments_are_dropped_with_their_positions() -> None:
    sequence = PackedSequence.from_lengths([0, 2, 0, 1, 0], position_starts=[9, 4, 9, 0, 9])
    assert sequence.lengths == (2, 1)
    assert sequence.position_starts == (4, 0)
    assert sequence.segment_ids_T.tolist() == [0, 0, 1]
    assert sequence.positions_T.tolist() == [4, 5, 0]


@pytest.mark.parametrize("num_pad_tokens", [0, 3])
def test_a_layout_without_a_live_segment(num_pad_tokens: int) -> None:
    sequence = PackedSequence.from_lengths([], num_pad_tokens)
    assert (sequence.num_segments, sequence.num_valid_tokens, sequence.max_seqlen) == (0, 0, 0)
    assert sequence.segment_ids_T.tolist() == [PAD_SEGMENT_ID] * num_pad_tokens


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=6), st.integers(0, 4))
def test_every_token_has_the_segment_and_position_that_counting_gives(
    segments: list[tuple[int, int]], num_pad_tokens: int
) -> None:
    lengths, starts = [length for length, _ in segments], [start for _, start in segments]
    sequence = PackedSequence.from_lengths(lengths, num_pad_tokens, starts)
    live = [(length, start) for length, start in segments if length]
    tokens = [(index, start + i) for index, (length, start) in enumerate(live) for i in range(length)]
    tokens += [(PAD_SEGMENT_ID, 0)] * num_pad_tokens
    assert list(zip(sequence.segment_ids_T.tolist(), sequence.positions_T.tolist(), strict=True)) == tokens


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"lengths": [2, -1]}, "must not be negative"),
        ({"lengths": [2], "num_pad_tokens": -1}, "num_pad_tokens=-1"),
        ({"lengths": [2], "position_starts": [0, 0]}, "2 entries for 1 segments"),
        ({"lengths": [2], "position_starts": [-3]}, "must not be negative"),
    ],
)
def test_lengths_that_describe_no_row_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PackedSequence.from_lengths(**arguments)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lengths": (3, 0), "position_starts": (0, 0)}, "drop empty segments"),
        ({"position_starts": ()}, "0 entries for 1 segments"),
        ({"num_pad_tokens": 1}, "the lengths describe 4 tokens in one row"),
        ({"segment_ids_T": torch.zeros(1, 3, dtype=torch.int32)}, "segment_ids_T has shape"),
        ({"positions_T": torch.zeros(2, dtype=torch.int64)}, "positions_T has shape"),
        ({"segment_ids_T": torch.zeros(3, dtype=torch.int64)}, "segment_ids_T has dtype"),
        ({"positions_T": torch.zeros(3, dtype=torch.int32)}, "positions_T has dtype"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(PackedSequence.from_lengths([3]), **changes)


def test_to_moves_tensors_and_leaves_derived_values_behind() -> None:
    sequence = PackedSequence.from_lengths([3, 2], 1, [0, 4])
    sequence.cache_entries["key"] = "metadata of this device"
    assert sequence.to("cpu") is sequence
    moved = sequence.to("meta")
    assert moved.device == moved.positions_T.device == torch.device("meta")
    assert (moved.lengths, moved.num_pad_tokens, moved.position_starts) == ((3, 2), 1, (0, 4))
    assert moved.cache_entries == {}


def test_layouts_do_not_share_cache_entries() -> None:
    first, second = PackedSequence.from_lengths([1]), PackedSequence.from_lengths([1])
    first.cache_entries["key"] = 1
    assert second.cache_entries == {}
    assert replace(first, num_pad_tokens=0).cache_entries == {}, "what is derived from a layout is none of its copy's"
    assert first != second, "layouts are compared by identity"


def test_a_shard_keeps_segment_and_position_of_every_token() -> None:
    whole = PackedSequence.from_lengths([5, 3, 7], 5, [0, 40, 2])
    parts = [whole.shard(rank, 2, 4) for rank in range(2)]
    for part in parts:
        assert part.token_ids_T is not None
        assert torch.equal(part.segment_ids_T, whole.segment_ids_T[part.token_ids_T])
        assert torch.equal(part.positions_T, whole.positions_T[part.token_ids_T])
        assert (part.num_tokens, part.num_segments, part.whole_lengths) == (10, 3, (5, 3, 7))
        assert part.position_starts == (0, 40, 2)
    assert [part.lengths for part in parts] == [(2, 1, 3), (3, 2, 4)]
    assert parts[0].positions_T.tolist() == [0, 1, 40, 2, 3, 8, 0, 0, 0, 0]
    assert parts[1].segment_ids_T.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, PAD_SEGMENT_ID]
    assert whole.whole_lengths == whole.lengths


def test_a_segment_may_have_no_token_on_a_rank() -> None:
    part = PackedSequence.from_lengths([1, 4, 1], 6).shard(1, 2, 4)
    assert (part.lengths, part.num_segments, part.max_seqlen) == ((0, 2, 0), 3, 2)
    assert part.segment_ids_T.tolist() == [1, 1] + [PAD_SEGMENT_ID] * 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids_T": None}, "give both or none"),
        ({"context_shard": None}, "give both or none"),
        ({"lengths": (2, 1, 2), "num_pad_tokens": 5}, r"leaves rank 0 \(2, 1, 3\)"),
        ({"num_pad_tokens": 3}, "9 tokens in the row: the cut gives every rank 10"),
        ({"token_ids_T": torch.zeros(9, dtype=torch.int64)}, "token_ids_T has shape"),
        ({"token_ids_T": torch.zeros(10, dtype=torch.int32)}, "token_ids_T has dtype"),
    ],
)
def test_parts_that_contradict_the_cut_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(PackedSequence.from_lengths([5, 3, 7], 5).shard(0, 2, 4), **changes)


def test_only_a_whole_layout_on_the_host_is_cut() -> None:
    whole = PackedSequence.from_lengths([5, 3, 7], 5)
    for other in (whole.to("meta"), whole.shard(0, 2, 4)):
        with pytest.raises(ValueError, match="only a whole micro-batch on the CPU"):
            other.shard(0, 2, 4)


def test_to_moves_the_tensors_of_a_shard() -> None:
    part = PackedSequence.from_lengths([5, 3, 7], 5).shard(0, 2, 4)
    moved = part.to("meta")
    assert moved.context_shard is part.context_shard
    assert len(moved.tensors) == 3
    assert {tensor.device.type for tensor in moved.tensors} == {"meta"}
