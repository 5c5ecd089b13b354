"""Decisions are made once and read as often as wanted."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from megatron_glue.types import ForwardContext, PackedSequence, SavedDecisions


def test_a_decision_is_written_once() -> None:
    decisions = SavedDecisions()
    assert decisions.get("layer 0") is None
    decisions.put("layer 0", (1, 2))
    assert decisions.get("layer 0") == decisions.get("layer 0") == (1, 2)
    with pytest.raises(AssertionError, match="'layer 0' was already saved"):
        decisions.put("layer 0", (3, 4))
    decisions.put("layer 1", (3, 4))
    assert decisions.get("layer 0") == (1, 2)


def test_a_context_cannot_be_changed_by_a_block() -> None:
    context = ForwardContext(PackedSequence.from_lengths([2]))
    with pytest.raises(FrozenInstanceError):
        context.step = 3
