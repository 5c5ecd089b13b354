"""The gate passes an honest run and fails on each planted regression."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.proofs.gate import DATA_CONTENT, Thresholds, check_same_run, judge, performance_limits, spread_of

BASELINE: dict[str, Any] = {
    "run": {"training.seed": 1, "steps": 3},
    "losses": [5.0, 4.0, 3.0],
    "grad_norms": [1.0, 0.9, 0.8],
    "heldout": [3.5],
    "outputs": {"layer 0, before training": [1.0, 2.0], "layer 1, before training": [3.0, 4.0]},
    "tokens_per_second": 1000.0,
    "peak_memory_bytes": 100 * 2**20,
}


def failing(**changes: Any) -> list[str]:
    """Names of the figures that fail when these values change."""
    return [
        figure.name
        for figure in judge({**copy.deepcopy(BASELINE), **changes}, BASELINE, Thresholds())
        if figure.is_failed
    ]


def test_the_same_run_passes() -> None:
    assert failing() == []


def test_better_is_no_regression() -> None:
    assert failing(tokens_per_second=2000.0, peak_memory_bytes=2**20) == []


def test_differences_within_the_thresholds_pass() -> None:
    assert failing(losses=[5.0, 4.0 * (1 + 9e-6), 3.0], tokens_per_second=901.0, peak_memory_bytes=109 * 2**20) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"losses": [5.0, 4.0, 3.0 * (1 + 2e-5)]}, "training loss, step 3"),
        ({"losses": [5.0, math.nan, 3.0]}, "training loss, step 2"),
        ({"losses": [5.0, 4.0]}, "training loss"),
        ({"grad_norms": [1.1, 0.9, 0.8]}, "gradient norm, step 1"),
        ({"heldout": [3.6]}, "held-out loss"),
        ({"outputs": {**BASELINE["outputs"], "layer 1, before training": [3.0, 4.01]}}, "layer 1, before training"),
        ({"outputs": {"layer 0, before training": [1.0, 2.0]}}, "layer 1, before training"),
        ({"outputs": {**BASELINE["outputs"], "layer 0, before training": [1.0, math.inf]}}, "layer 0, before training"),
        ({"tokens_per_second": 890.0}, "tokens/s"),
        ({"peak_memory_bytes": 111 * 2**20}, "peak memory"),
    ],
)
def test_a_planted_regression_fails(change: dict[str, Any], name: str) -> None:
    assert failing(**change) == [name]


def test_thresholds_are_options() -> None:
    slower = {**BASELINE, "tokens_per_second": 600.0}
    assert not any(figure.is_failed for figure in judge(slower, BASELINE, Thresholds(throughput=0.5)))


def test_bf16_has_limits_of_its_own_and_given_ones_win() -> None:
    limits = Thresholds.of({"made_with": {"dtype": "bfloat16"}})
    assert (limits.loss, limits.output) == (1e-2, 1e-2)
    assert Thresholds.of({"made_with": {"dtype": "float32"}}) == Thresholds.of({}) == Thresholds()
    assert limits.with_given({"loss": 0.0, "memory": None}) == Thresholds(loss=0.0, output=1e-2)


RUN = {"training.seed": 1, "steps": 3, DATA_CONTENT: "a"}


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"training.seed": 2}, r"training\.seed=2: the baseline was made with training\.seed=1"),
        # The content of the held-out documents follows from the seed: what the user set is named.
        ({"training.seed": 2, DATA_CONTENT: "b"}, r"training\.seed=2"),
        ({DATA_CONTENT: "b"}, r"data\.content=b"),
        ({"model.new": True}, r"model\.new=True: the baseline was made with model\.new=False"),
    ],
)
def test_another_run_is_refused(changes: dict[str, Any], difference: str) -> None:
    with pytest.raises(ConfigError, match=difference):
        check_same_run({**RUN, **changes}, RUN, {"model.new": False}, "--gate")


def test_a_setting_that_an_earlier_version_did_not_have_is_its_default() -> None:
    check_same_run({**RUN, "model.new": False}, RUN, {"model.new": False}, "--gate")
    check_same_run(RUN, {**RUN, "model.new": False}, {"model.new": False}, "--gate")


MACHINE = {"device": "cpu", "cores": 2}


def performing(judgement: Any = "auto", machine: Any = MACHINE, step_ms: Any = (10.0, 10.0, 10.0)) -> tuple[Any, str]:
    """Limits of throughput and memory for a run on a machine against one on ``MACHINE``."""
    limits, why = performance_limits(
        {"machine": machine, "step_ms": list(step_ms)},
        {"machine": MACHINE, "step_ms": [10.0, 10.0]},
        Thresholds(),
        judgement,
    )
    return (limits.throughput, limits.memory), why


def test_throughput_and_memory_are_judged_on_the_same_kind_of_machine_only() -> None:
    assert performing()[0] == (0.1, 0.1)
    limits, why = performing(machine={"device": "cpu", "cores": 4})
    assert limits == (math.inf, math.inf)
    assert "cores is 4 and was 2" in why
    assert performing("refuse", machine={})[0] == (0.1, 0.1)
    assert performing("report")[0] == (math.inf, math.inf)


def test_throughput_may_drop_by_the_spread_of_step_times() -> None:
    (throughput, memory), why = performing(step_ms=(8.0, 10.0, 12.0, 14.0, 16.0))
    assert throughput == pytest.approx(4 / 12)
    assert memory == 0.1
    assert "spread by 33.3%, so it was not at rest" in why
    assert performing("refuse", step_ms=(8.0, 10.0, 12.0, 14.0, 16.0))[0] == (0.1, 0.1)
    assert spread_of([5.0]) == 0.0


def test_what_is_not_judged_does_not_fail() -> None:
    worse = {**BASELINE, "tokens_per_second": 1.0, "peak_memory_bytes": 2**40}
    limits = Thresholds(throughput=math.inf, memory=math.inf)
    assert not any(figure.is_failed for figure in judge(worse, BASELINE, limits))
