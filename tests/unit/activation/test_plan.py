"""Contradictions are refused with what to change."""

from __future__ import annotations

import pytest

from megatron_glue.activation import ActivationPlan


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
