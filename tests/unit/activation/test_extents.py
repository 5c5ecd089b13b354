"""Extents never overlap, neighbours merge, and everything given back is free again."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megatron_glue.activation.extents import ALIGNMENT_BYTES, ExtentList, round_up


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * ALIGNMENT_BYTES), st.integers(0, 99)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_random_use_never_overlaps_and_ends_as_one_hole(operations):
    extents = ExtentList(16 * ALIGNMENT_BYTES)
    taken = []
    for is_take, num_bytes, pick in operations:
        if is_take:
            extent = extents.take(num_bytes)
            if extent is not None:
                assert extent.num_bytes == round_up(num_bytes)
                assert all(extent.end <= other.begin or other.end <= extent.begin for other in taken)
                taken.append(extent)
        elif taken:
            extents.give_back(taken.pop(pick % len(taken)))
        assert extents.taken_bytes == sum(extent.num_bytes for extent in taken)
    for extent in taken:
        extents.give_back(extent)
    assert extents.take(16 * ALIGNMENT_BYTES) is not None


def test_growth_counts_the_hole_at_the_end():
    extents = ExtentList()
    extents.grow(extents.grow_for(2 * ALIGNMENT_BYTES))
    first = extents.take(2 * ALIGNMENT_BYTES)
    assert first is not None
    assert extents.take(1) is None
    extents.give_back(first)
    assert extents.grow_for(3 * ALIGNMENT_BYTES) == 3 * ALIGNMENT_BYTES
    extents.grow(3 * ALIGNMENT_BYTES)
    assert extents.take(3 * ALIGNMENT_BYTES) is not None


def test_giving_back_twice_is_noticed():
    extents = ExtentList(4 * ALIGNMENT_BYTES)
    extent = extents.take(1)
    assert extent is not None
    extents.give_back(extent)
    with pytest.raises(AssertionError, match="freed twice"):
        extents.give_back(extent)


def test_empty_tensors_get_an_extent_too():
    assert round_up(0) == ALIGNMENT_BYTES
