"""Bars of a timeline -> what a copy and a block cost; of several ranks and parts the worst counts."""

from __future__ import annotations

import math

from megatron_glue.activation.offload_costs import OffloadCosts, costs_of, merge_costs
from megatron_glue.activation.statistics import BlockCall, TimelineEvent

SIZES = {"input_bytes": 8, "total_bytes": 24, "room_bytes": 100.0, "is_integrated": False}


def bar(name, block, start_ms, duration_ms, step=1, micro_batch=0):
    return TimelineEvent(name, "any", BlockCall(micro_batch, block), step, start_ms, start_ms + duration_ms)


def test_the_quickest_time_of_each_block_counts_and_blocks_are_averaged():
    events = [
        *(bar("forward", 0, 0, 1), bar("forward", 1, 1, 3), bar("forward", 1, 5, 300, step=2)),
        *(bar("backward", 0, 9, 4), bar("backward", 1, 9, 8), bar("backward", 0, 9, 40, micro_batch=1)),
        *(bar("offload", 0, 0, 2), bar("reload", 0, 0, 5), bar("wait", 0, 0, 50)),
    ]
    assert costs_of(events, **SIZES) == OffloadCosts(2.0, 5.0, 2.0, 6.0, 8, 24, 100.0, 2, False)


def test_without_bars_nothing_is_known_and_others_are_not_disturbed():
    nothing = costs_of([], **{**SIZES, "input_bytes": 0, "total_bytes": 0, "room_bytes": math.inf})
    assert nothing == OffloadCosts()
    known = OffloadCosts(2.0, 5.0, 2.0, 6.0, 8, 24, 100.0, 2, True)
    assert merge_costs([nothing, known, nothing]) == known


def test_maxima_describe_the_worst_of_all():
    one = OffloadCosts(2.0, 5.0, 2.0, 6.0, 8, 24, 100.0, 2, False)
    other = OffloadCosts(1.0, 7.0, 3.0, 5.0, 4, 40, 50.0, 4, True)
    assert OffloadCosts.from_maxima(one.as_maxima()) == one
    merged = OffloadCosts.from_maxima([max(pair) for pair in zip(one.as_maxima(), other.as_maxima(), strict=True)])
    assert merged == OffloadCosts(2.0, 7.0, 2.0, 5.0, 8, 40, 50.0, 4, True)
    assert merge_costs([one, other]).total_bytes == 64, "inputs of parts of one rank add up"
