"""Measured costs -> how many inputs leave, through how many buffers, and why."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_glue.activation.offload_costs import OffloadCosts
from megatron_glue.activation.offload_policy import OffloadBounds, OffloadDecision, decide

MIB = 1 << 20
FAST = OffloadCosts(
    away_ms=0.5, back_ms=1.0, forward_ms=1.0, backward_ms=3.0, input_bytes=MIB, total_bytes=11 * MIB, num_blocks=12
)
"""Twelve blocks, of which eleven inputs leave; a copy takes a third of a block's backward."""
CASES = {
    "copies are hidden": (FAST, {}, (12, 2), "a copy takes 0.50 ms away and 1.00 ms back"),
    "copies are negligible": (replace(FAST, away_ms=0.01, back_ms=0.02), {}, (12, 1), "0.02 ms back"),
    "one buffer allowed, copies wait": (FAST, {"double_buffer": False}, (2, 1), "1.00 ms back"),
    "room for one buffer": (FAST, {"buffer_bytes": MIB}, (2, 1), "1.00 ms back"),
    "room for two buffers": (FAST, {"buffer_bytes": 2 * MIB}, (12, 2), "1.00 ms back"),
    "copies back twice as slow as compute": (replace(FAST, back_ms=6.0), {}, (5, 2), "6.00 ms back"),
    "copies away four times as slow": (replace(FAST, away_ms=4.0), {}, (3, 2), "4.00 ms away"),
    "copies much slower than compute": (replace(FAST, back_ms=60.0), {}, (0, 0), "waiting would dominate"),
    "integrated memory": (replace(FAST, is_integrated=True), {}, (0, 0), "shares the host's memory"),
    "short sequences": (FAST, {"least_input_bytes": 2 * MIB}, (0, 0), "inputs of 1024 KiB are below 2048 KiB"),
    "two blocks": (replace(FAST, num_blocks=2, total_bytes=MIB), {}, (0, 0), "buffers would hold as much"),
    "two blocks, many micro-batches in flight": (
        replace(FAST, num_blocks=2, total_bytes=16 * MIB),
        {},
        (2, 2),
        "1.00 ms back",
    ),
    "slow copies, no room for the rest": (
        replace(FAST, back_ms=60.0, room_bytes=5.5 * MIB),
        {},
        (7, 2),
        "the rest would not fit into 6 MiB",
    ),
    "slow copies, no room at all": (replace(FAST, back_ms=60.0, room_bytes=-MIB), {}, (12, 2), "would not fit"),
    "slow copies, much room": (replace(FAST, back_ms=60.0, room_bytes=100 * MIB), {}, (0, 0), "waiting would dominate"),
    "short sequences, no room": (
        replace(FAST, room_bytes=0.0),
        {"least_input_bytes": 2 * MIB},
        (12, 2),
        "a copy takes",
    ),
    "nothing left the device": (OffloadCosts(num_blocks=1), {}, (1, 2), "no input left"),
}


@pytest.mark.parametrize("name", CASES)
def test_decision(name):
    costs, bounds, (num_leaving, num_buffers), reason = CASES[name]
    decision = decide(costs, OffloadBounds(**bounds))
    assert (decision.num_leaving, decision.num_buffers) == (num_leaving, num_buffers)
    assert reason in decision.reason
    assert decision.num_blocks == costs.num_blocks
    assert OffloadDecision.from_dict(decision.as_dict()) == decision


def test_a_decision_is_one_line():
    for costs, bounds, *_ in CASES.values():
        assert "\n" not in decide(costs, OffloadBounds(**bounds)).describe()
    assert decide(FAST, OffloadBounds()).describe().startswith("inputs of 12 of 12 blocks leave, two buffers: ")
    assert decide(replace(FAST, is_integrated=True), OffloadBounds()).describe().startswith("off, all inputs stay")


@pytest.mark.parametrize("back_ms", [0.1, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
def test_slower_copies_never_let_more_leave(back_ms):
    decisions = [decide(replace(FAST, back_ms=factor * back_ms), OffloadBounds()) for factor in (1.0, 1.5)]
    assert decisions[0].num_leaving >= decisions[1].num_leaving


@pytest.mark.parametrize(
    "change",
    [
        {"num_leaving": 13},
        {"num_leaving": -1},
        {"num_leaving": 2.0},
        {"num_leaving": True},
        {"num_buffers": 3},
        {"num_buffers": 0},
        {"num_blocks": 0, "num_leaving": 0, "num_buffers": 0},
        {"reason": None},
        {"more": 1},
    ],
)
def test_what_is_no_decision_is_refused(change):
    good = decide(FAST, OffloadBounds()).as_dict()
    with pytest.raises(ValueError, match="offload decision"):
        OffloadDecision.from_dict({**good, **change})


def test_infinities_stay_out_of_what_is_said():
    assert "inf" not in decide(replace(FAST, room_bytes=math.inf), OffloadBounds()).describe()
