"""Named ranges: what profilers see, on which objects, and after which errors."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_glue.ops.ranges import named_range, put_range


class Counter:
    """Something with a method."""

    def add(self, a: int, *, b: int) -> int:
        """Add."""
        return a + b


def test_a_range_is_put_on_one_object_alone() -> None:
    named, plain = Counter(), Counter()
    put_range(named, "add", "adding")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert named.add(1, b=2) == 3
        assert plain.add(1, b=2) == 3
    assert [event.name for event in profiler.events()] == ["adding"]
    assert named.add.__doc__ == "Add."


def test_nvtx_ranges_are_closed_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: calls.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    with pytest.raises(ValueError, match="inside"), named_range("outer", use_nvtx=True):
        raise ValueError("inside")
    with named_range("torch only"):
        pass
    assert calls == ["push outer", "pop"]
