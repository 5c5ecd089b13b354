"""The gate passes an honest run and fails on each planted regression."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.proofs.gate import Thresholds, judge

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


def test_another_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.seed=2: the baseline was made with training\.seed=1"):
        failing(run={"training.seed": 2, "steps": 3})
