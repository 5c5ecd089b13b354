"""Where a step's time goes, from synthetic spans: each verdict, what hides what, and sums that add up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_glue.proofs.step_profile import CATEGORIES, Kind, Span, analyse, explain

LARGE_US = 50.0


def spans(*parts: tuple[str, Kind, float, float], step_us: float = 1000.0) -> list[Span]:
    """A step of 1 ms and what happens in it."""
    return [Span("step", "step", 0.0, step_us), *(Span(*part) for part in parts)]


VERDICTS: dict[str, list[tuple[str, Kind, float, float]]] = {
    "compute": [("aten::mm", "product", 0, 700), ("aten::add", "operator", 700, 710)],
    "glue": [("aten::mm", "product", 0, 300), *(("aten::add", "operator", t, t + 10) for t in range(300, 1000, 20))],
    "copy": [("aten::mm", "product", 0, 300), ("Memcpy HtoD", "copy", 200, 900)],
    "communication": [("ncclDevKernel_AllReduce", "communication", 100, 900), ("aten::mm", "product", 0, 200)],
    "input": [("data wait", "input", 0, 600), ("aten::mm", "product", 600, 900)],
    "optimizer": [("optimizer", "optimizer", 400, 1000), ("aten::mm", "product", 0, 300)],
}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_verdict(verdict: str) -> None:
    profile = analyse(spans(*VERDICTS[verdict]), LARGE_US)
    assert profile.verdict == verdict
    assert explain(profile).startswith(f"{verdict}-bound")
    assert profile.as_json()["verdict"] == f"{verdict}-bound"


def test_each_moment_counts_once_for_what_matters_most() -> None:
    profile = analyse(
        spans(
            ("aten::mm", "product", 100, 400),
            ("aten::mm", "product", 300, 500),
            ("ncclDevKernel", "communication", 400, 600),
            ("Memcpy HtoD", "copy", 450, 700),
            ("data wait", "input", 0, 120),
            ("optimizer", "optimizer", 900, 1000),
            ("aten::addcmul", "operator", 910, 990),
        ),
        LARGE_US,
    )
    assert profile.us_by_category == {
        "compute": 400,
        "communication": 100,
        "copy": 100,
        "input": 100,
        "optimizer": 100,
        "glue": 200,
    }
    assert profile.hidden_communication_us == 100
    assert profile.copy_us == 250
    assert profile.removable_ceiling == pytest.approx(1000 / 700)


def test_a_long_operator_is_compute_and_a_short_one_is_glue() -> None:
    profile = analyse(spans(("long", "operator", 0, 50), ("short", "operator", 100, 149)), LARGE_US)
    assert profile.us_by_category["compute"] == 50
    assert profile.us_by_category["glue"] == 950
    assert (profile.num_operators, profile.num_large) == (2, 1)


def test_small_operators_are_listed_by_time_without_those_of_the_optimizer() -> None:
    profile = analyse(
        spans(
            ("b", "operator", 0, 10),
            ("a", "operator", 20, 25),
            ("a", "operator", 30, 45),
            ("aten::nonzero", "sync", 50, 52),
            ("of the update", "operator", 905, 945),
            ("optimizer", "optimizer", 900, 1000),
        ),
        LARGE_US,
    )
    found = [(each.name, each.count_per_step, each.us_per_step) for each in profile.small_operators]
    assert found == [("a", 2, 20), ("b", 1, 10), ("aten::nonzero", 1, 2)]
    assert profile.num_syncs == 1


def test_figures_are_means_over_steps_and_leave_out_what_lies_between_them() -> None:
    two = [
        Span("step", "step", 0, 1000),
        Span("step", "step", 2000, 5000),
        Span("aten::mm", "product", 500, 2500),
        Span("between", "sync", 1200, 1300),
        Span("inside", "sync", 2600, 2700),
    ]
    profile = analyse(two, LARGE_US)
    assert profile.step_us == 2000
    assert profile.us_by_category["compute"] == 500
    assert profile.num_syncs == 0.5


def test_waits_without_spans_are_taken_from_the_glue() -> None:
    profile = analyse(spans(("aten::mm", "product", 0, 400)), LARGE_US, waited_for_copies_us=250.0)
    assert (profile.us_by_category["copy"], profile.us_by_category["glue"]) == (250, 350)
    assert analyse(spans(("aten::mm", "product", 0, 990)), LARGE_US, 250.0).us_by_category["glue"] == 0


def test_without_a_step_there_is_nothing_to_say() -> None:
    with pytest.raises(ValueError, match="no step"):
        analyse([Span("aten::mm", "product", 0, 1)], LARGE_US)


KINDS: tuple[Kind, ...] = ("optimizer", "product", "operator", "communication", "copy", "input", "sync")
RANDOM_SPAN = st.tuples(st.sampled_from(KINDS), st.integers(-100, 1100), st.integers(0, 300))


@settings(max_examples=100, deadline=None)
@given(st.lists(RANDOM_SPAN, max_size=20), st.integers(0, 2000))
def test_categories_add_up_to_the_step(parts: list[tuple[Kind, int, int]], waited_us: int) -> None:
    drawn = [("x", kind, float(start), float(start + length)) for kind, start, length in parts]
    profile = analyse(spans(*drawn), LARGE_US, float(waited_us))
    assert sum(profile.us_by_category.values()) == pytest.approx(1000.0)
    assert all(profile.us_by_category[category] >= -1e-9 for category in CATEGORIES)
