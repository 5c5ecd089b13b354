"""Contradictions are refused with what to change."""

from __future__ import annotations

import pytest

from megatron_glue.activation import ActivationPlan
from megatron_glue.activation.plan import OffloadShare


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offload": True}, "set recompute"),
        ({"recompute": True, "double_buffer": True}, "set offload"),
        ({"buffer_size_bytes": -1}, "must not be negative"),
        ({"offload_modules": frozenset({"attn_core"})}, "set offload"),
        ({"num_recomputed": 0}, "turn recompute off"),
        ({"max_inflight": 3}, "use 1 or 2"),
        ({"max_bytes_per_s": -1.0}, "must not be negative"),
    ],
)
def test_contradicting_plans_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ActivationPlan(**fields)


@pytest.mark.parametrize(
    ("num_leaving", "expected"),
    [
        (0, "......"),
        (1, "x....."),
        (2, "x..x.."),
        (3, "x.x.x."),
        (4, "xx.xx."),
        (5, "xxxxx."),
        (6, "xxxxxx"),
    ],
)
def test_inputs_that_leave_are_evenly_spaced_and_the_last_block_stays_first(num_leaving, expected):
    share = OffloadShare(num_leaving, 6)
    assert "".join("x" if share.leaves(position) else "." for position in range(6)) == expected


def test_any_share_lets_as_many_leave_as_it_says():
    for num_blocks in range(1, 20):
        for num_leaving in range(num_blocks + 1):
            share = OffloadShare(num_leaving, num_blocks)
            for first in (0, num_blocks, 3):
                assert sum(share.leaves(first + position) for position in range(num_blocks)) == num_leaving
