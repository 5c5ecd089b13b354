from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_glue.training.telemetry.ranks import RankFigures, find_straggler, mean_of, table_of_ranks

FIGURES = RankFigures(100.0, 1.0, 40.0, 2.0, 5.0, 6.0, 7.0, math.nan, 8.0, 9.0)


def test_the_straggler_is_who_waits_least_for_others() -> None:
    table = [FIGURES, replace(FIGURES, communication_ms=10.0), replace(FIGURES, communication_ms=41.0)]
    rank, ratio = find_straggler(table)
    assert rank == 1
    assert ratio == pytest.approx(90 / 60)


def test_ranks_that_are_alike_have_a_ratio_of_one() -> None:
    assert find_straggler([FIGURES, FIGURES]) == (0, 1.0)


def test_one_rank_needs_no_group() -> None:
    (alone,) = table_of_ranks(FIGURES, 0, 1, None)
    assert math.isnan(alone.utilization)
    assert replace(alone, utilization=0.0) == replace(FIGURES, utilization=0.0)


def test_what_was_not_measured_is_in_no_mean() -> None:
    assert mean_of([1.0, math.nan, 3.0]) == 2.0
    assert mean_of([math.nan]) is None
