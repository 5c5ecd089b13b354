"""How a micro-batch is cut among context-parallel ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_glue.types import ContextShard

LENGTHS = st.lists(st.integers(1, 70), max_size=8)


def shard(lengths: list[int], size: int, alignment: int, rank: int = 0, extra: int = 0) -> ContextShard:
    places = sum(-(-length // alignment) * alignment for length in lengths)
    return ContextShard(rank, size, alignment, tuple(lengths), places + extra * size)


def test_f13_pieces_follow_padded_boundaries_and_hold_real_tokens() -> None:
    cut = shard([5, 3, 7], 2, 4)
    # Padded to 8, 4 and 8 places: pieces of 2, 1 and 2 places.
    assert cut.num_tokens == 20
    assert cut.pieces_of(0).tolist() == [[[0, 2], [5, 5]], [[0, 1], [3, 3]], [[0, 2], [6, 7]]]
    assert cut.pieces_of(1).tolist() == [[[2, 4], [4, 5]], [[1, 2], [2, 3]], [[2, 4], [4, 6]]]
    # Tokens of rank 0, then its 4 of the 5 padding tokens.
    assert cut.token_ids_of(0).tolist() == [0, 1, 5, 8, 9, 14, 15, 16, 17, 18]
    assert cut.token_ids_of(1).tolist() == [2, 3, 4, 6, 7, 10, 11, 12, 13, 19]
    assert cut.num_valid_tokens_of_ranks == (6, 9)


@settings(deadline=None, max_examples=80)
@given(LENGTHS, st.sampled_from([2, 3, 4]), st.integers(1, 3), st.integers(0, 5))
def test_all_ranks_together_hold_every_token_once(lengths: list[int], size: int, factor: int, extra: int) -> None:
    cut = shard(lengths, size, 2 * size * factor, extra=extra)
    ids = [cut.token_ids_of(rank) for rank in range(size)]
    assert {len(row) for row in ids} == {cut.num_local_tokens}
    assert sorted(np.concatenate(ids).tolist()) == list(range(cut.num_tokens))
    num_valid = sum(lengths)
    for rank, row in enumerate(ids):
        valid = row[row < num_valid]
        # Valid tokens first, in their order; padding at the tail.
        assert valid.tolist() == sorted(valid.tolist()) == row[: len(valid)].tolist()
        assert len(valid) == cut.num_valid_tokens_of_ranks[rank]


@settings(deadline=None, max_examples=80)
@given(LENGTHS, st.sampled_from([2, 4]))
def test_the_load_of_ranks_differs_by_what_the_last_places_lack(lengths: list[int], size: int) -> None:
    """Score pairs (query, key before it) per segment; a full segment is cut into exactly equal loads."""
    alignment = 2 * size
    for length in lengths:
        cut = shard([length], size, alignment)
        loads = [sum((b - a) * (a + b + 1) // 2 for (a, b) in cut.pieces_of(rank)[0].tolist()) for rank in range(size)]
        assert sum(loads) == length * (length + 1) // 2
        if length % alignment == 0:
            assert len(set(loads)) == 1
        # Of the padded segment, whose loads are equal, at most its last alignment - 1 queries are missing.
        assert max(loads) - min(loads) < alignment * -(-length // alignment) * alignment


@settings(deadline=None, max_examples=40)
@given(LENGTHS, st.sampled_from([2, 4]))
def test_the_tokens_of_ranks_differ_by_less_than_the_alignment_per_segment(lengths: list[int], size: int) -> None:
    alignment = 2 * size
    counts = shard(lengths, size, alignment).num_valid_tokens_of_ranks
    assert max(counts) - min(counts) <= (alignment - 1) * len(lengths)


@pytest.mark.parametrize("size", [2, 4])
def test_a_segment_of_one_token_stands_on_the_first_rank_alone(size: int) -> None:
    cuts = [shard([1], size, 2 * size, rank) for rank in range(size)]
    assert [cut.local_lengths for cut in cuts] == [(1,)] + [(0,)] * (size - 1)


def test_no_segment_is_all_padding() -> None:
    cut = ContextShard(1, 2, 4, (), 6)
    assert cut.token_ids_of(0).tolist() == [0, 1, 2]
    assert cut.token_ids_of(1).tolist() == [3, 4, 5]
    assert cut.local_lengths == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"size": 1, "rank": 0}, "at least 2 ranks"),
        ({"rank": 2}, "rank=2"),
        ({"rank": -1}, "rank=-1"),
        ({"alignment": 6}, "alignment=6: must be a multiple of 2 x 2"),
        ({"num_tokens": 21}, "num_tokens=21: must be a multiple of 2"),
        ({"num_tokens": 18}, "need 20 places, the micro-batch has 18"),
    ],
)
def test_cuts_that_do_not_fit_are_refused(changes: dict[str, Any], reason: str) -> None:
    arguments = {"rank": 0, "size": 2, "alignment": 4, "lengths": (5, 3, 7), "num_tokens": 20} | changes
    with pytest.raises(ValueError, match=reason):
        ContextShard(**arguments)
