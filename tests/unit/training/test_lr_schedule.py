"""Hand-computed values of the schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import OptimizerConfig
from megatron_glue.training.lr_schedule import LearningRateSchedule


def schedule(train_iters: int, **fields: object) -> LearningRateSchedule:
    return LearningRateSchedule(OptimizerConfig(lr=1.0, min_lr=0.2).model_copy(update=fields), train_iters)


def values(schedule: LearningRateSchedule, *iterations: int) -> list[float]:
    return [schedule.at(iteration) for iteration in iterations]


def test_warmup_is_linear_and_its_first_update_moves() -> None:
    warmup = schedule(100, lr_warmup_iters=4)
    assert values(warmup, 0, 1, 2, 3, 4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine() -> None:
    cosine = schedule(18, lr_decay_style="cosine", lr_warmup_iters=2)
    # A quarter of the way: 0.2 + 0.8 * (1 + cos(45 degrees)) / 2.
    assert values(cosine, 2, 6, 10, 18, 1000) == pytest.approx([1.0, 0.8828427, 0.6, 0.2, 0.2])


def test_linear() -> None:
    linear = schedule(10, lr_decay_style="linear", lr_warmup_iters=0)
    assert values(linear, 0, 1, 5, 9, 10, 11) == pytest.approx([1.0, 0.92, 0.6, 0.28, 0.2, 0.2])


def test_decay_may_end_before_or_after_the_run() -> None:
    early = schedule(100, lr_decay_style="linear", lr_warmup_iters=0, lr_decay_iters=10)
    late = schedule(10, lr_decay_style="linear", lr_warmup_iters=0, lr_decay_iters=20)
    assert values(early, 5, 10, 99) == pytest.approx([0.6, 0.2, 0.2])
    assert values(late, 5, 9) == pytest.approx([0.8, 0.64])


def test_wsd_is_flat_and_then_falls() -> None:
    wsd = schedule(20, lr_decay_style="WSD", lr_warmup_iters=5, lr_wsd_decay_iters=4)
    assert values(wsd, 4, 5, 16, 17, 18, 20) == pytest.approx([1.0, 1.0, 1.0, 0.8, 0.6, 0.2])


def test_wsd_decays_over_a_tenth_of_the_run_by_default() -> None:
    wsd = schedule(100, lr_decay_style="WSD", lr_warmup_iters=0)
    assert values(wsd, 90, 95, 100) == pytest.approx([1.0, 0.6, 0.2])


def test_wsd_decay_longer_than_the_run_starts_after_warmup() -> None:
    wsd = schedule(10, lr_decay_style="WSD", lr_warmup_iters=2, lr_wsd_decay_iters=50)
    assert values(wsd, 1, 2, 6, 10) == pytest.approx([1.0, 1.0, 0.6, 0.2])


def test_constant_stays_at_the_peak() -> None:
    constant = schedule(10, lr_decay_style="constant", lr_warmup_iters=2, min_lr=5.0)
    assert values(constant, 0, 1, 9, 1000) == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("style", ["cosine", "linear", "WSD"])
def test_warmup_that_reaches_past_the_decay_goes_first(style: str) -> None:
    long_warmup = schedule(4, lr_decay_style=style, lr_warmup_iters=8)
    assert values(long_warmup, 0, 3, 7, 8) == [0.125, 0.5, 1.0, 0.2]
    equal = schedule(4, lr_decay_style=style, lr_warmup_iters=4)
    assert values(equal, 3, 4) == [1.0, 0.2]


@given(
    style=st.sampled_from(["cosine", "linear", "WSD", "constant"]),
    train_iters=st.integers(1, 40),
    warmup=st.integers(0, 50),
    decay=st.none() | st.integers(1, 50),
    wsd=st.none() | st.integers(1, 50),
)
def test_bounds_and_monotony(style: str, train_iters: int, warmup: int, decay: int | None, wsd: int | None) -> None:
    tried = schedule(
        train_iters,
        lr_decay_style=style,
        lr_warmup_iters=warmup,
        lr_decay_iters=decay,
        lr_wsd_decay_iters=wsd,
        min_lr=0.0,
    )
    rates = values(tried, *range(train_iters + 60))
    assert rates[0] > 0
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_minimum_above_peak_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--min-lr=2\.0.*--lr 1\.0"):
        schedule(10, min_lr=2.0)
