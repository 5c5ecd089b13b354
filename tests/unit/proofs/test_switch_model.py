"""The arithmetic of what each switch gains."""

from __future__ import annotations

import pytest

from megatron_glue.proofs.switch_model import Expectation, LayerCosts, StepShape, expectations

COSTS = LayerCosts(build_ms=0.5, copy_ms=2.0, compute_ms=3.0, loop_ms=9.0, one_pass_ms=4.0)
SHAPE = StepShape(num_layers=5, num_moe_layers=3, num_micro_batches=2, is_recomputed=False)


def expect(costs: LayerCosts = COSTS, shape: StepShape = SHAPE, *, is_on: bool = False) -> list[Expectation]:
    """Expectations for a step of 100 ms."""
    return expectations(costs, shape, 100.0, has_cache=is_on, has_double_buffer=is_on, has_one_pass=is_on)


def test_gains() -> None:
    cache, double_buffer, grouping = expect()
    assert cache.gain_ms == pytest.approx(2 * (5 - 1) * 0.5)
    assert double_buffer.gain_ms == pytest.approx(2 * (5 - 1) * 2.0)
    assert grouping.gain_ms == pytest.approx(2 * 3 * (9.0 - 4.0))
    assert cache.ratio == pytest.approx(100 / 96), "off: the step would be shorter"


def test_a_switch_that_is_on_has_its_gain_already() -> None:
    cache, *_ = expect(is_on=True)
    assert cache.ratio == pytest.approx(104 / 100)


def test_recompute_builds_again() -> None:
    cache, *_ = expect(shape=StepShape(5, 3, 2, is_recomputed=True))
    assert cache.gain_ms == pytest.approx(2 * (5 - 1 + 5) * 0.5)


def test_compute_bounds_what_can_be_hidden() -> None:
    _, double_buffer, _ = expect(LayerCosts(copy_ms=7.0, compute_ms=3.0))
    assert double_buffer.gain_ms == pytest.approx(2 * 4 * 3.0)


def test_what_was_not_measured_says_why() -> None:
    cache, double_buffer, grouping = expect(LayerCosts(), StepShape(5, 0, 2, is_recomputed=False))
    assert [each.gain_ms for each in (cache, double_buffer, grouping)] == [None, None, None]
    assert double_buffer.formula == "nothing was offloaded, so there is no copy to hide"
    assert grouping.formula == "the model has no experts"
    assert expect(LayerCosts())[2].formula == "not measured: experts are spread over ranks"
