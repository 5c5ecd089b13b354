"""Charts are whole XML, keep what a reader must see, and stay small."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_glue.proofs.svg_charts import (
    HEIGHT,
    WIDTH,
    Chart,
    Line,
    draw_chart,
    draw_heat_map,
    short,
    thin_out,
    ticks,
)


def places(picture: str) -> list[list[tuple[float, float]]]:
    found = re.findall(r'<polyline class="line c\d" points="([^"]*)"', picture)
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in text.split())] for text in found]


def test_higher_values_stand_higher_and_later_ones_further_right() -> None:
    picture, points = draw_chart(Chart("a", "", [Line("x", [(1, 1.0), (2, 3.0), (3, 2.0)])]))
    ((first, second, third),) = places(picture)
    assert first[0] < second[0] < third[0]
    assert second[1] < third[1] < first[1]
    assert points["lines"][0]["points"][1][0] == 2
    assert points["lines"][0]["points"][1][2] == "3"


def test_what_is_not_finite_makes_a_gap() -> None:
    line = Line("x", [(1, 1.0), (2, 2.0), (3, math.nan), (4, math.inf), (5, 1.0), (6, 2.0)])
    picture, points = draw_chart(Chart("a", "", [line]))
    assert [len(run) for run in places(picture)] == [2, 2]
    assert [point[0] for point in points["lines"][0]["points"]] == [1, 2, 5, 6]
    assert "nan" not in picture
    assert "inf" not in picture


@given(
    values=st.lists(st.floats(-1e12, 1e12) | st.just(math.nan), min_size=1, max_size=40),
    starts_at_zero=st.booleans(),
    is_dots=st.booleans(),
)
def test_everything_stays_inside_the_picture(values: list[float], starts_at_zero: bool, is_dots: bool) -> None:
    line = Line("<&>", list(enumerate(values)), is_dots)
    picture, _ = draw_chart(Chart('"<t>"', "", [line], [("level", 0.5)], starts_at_zero))
    root = ElementTree.fromstring(picture)
    numbers = [float(n) for e in root.iter() for n in re.findall(r"[-\d.e]+", e.get("points", ""))]
    assert all(-1 <= number <= max(WIDTH, HEIGHT) + 1 for number in numbers)


def test_many_points_are_put_together_and_keep_their_extremes() -> None:
    values = [(index, 100.0 if index == 777 else 1.0) for index in range(100_000)]
    thinned = thin_out(values, 600)
    assert len(thinned) <= 600
    assert max(point.high for point in thinned) == 100.0
    assert thinned[-1].x == 99_999
    picture, _ = draw_chart(Chart("a", "", [Line("x", values)]))
    assert "band" in picture
    assert len(picture) < 60_000


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0, 10, [0, 2, 4, 6, 8, 10]), (1, 1, [1]), (0.1, 0.42, [0.1, 0.2, 0.3, 0.4])]
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1500, "1500"), (25_000, "25k"), (3.2e6, "3.2M"), (1e-3, "1.0e-03"), (0.25, "0.25")]
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text


def test_a_heat_map_has_a_cell_per_expert_and_marks_dead_ones() -> None:
    root = ElementTree.fromstring(draw_heat_map([[0.0, 2.0, 1.0], [0.5, 1.5, 1.0]], "MoE layer", "expert"))
    cells = [element for element in root.iter("g") if element.get("class", "").startswith("cell")]
    assert [cell.get("class") for cell in cells[:3]] == ["cell dead", "cell more", "cell less"]
    assert len(cells) == 6
    assert cells[4].findtext("title") == "MoE layer 1, expert 1: 1.50 of an even share"
    assert [cell.findall("rect")[1].get("fill-opacity") for cell in cells[:3]] == ["1.00", "1.00", "0.00"]


def test_a_large_heat_map_has_small_cells_without_text() -> None:
    root = ElementTree.fromstring(draw_heat_map([[1.0] * 128] * 60, "MoE layer", "expert"))
    cells = list(root.iter("g"))
    assert len(cells) == 60 * 128
    assert not any(cell.findall("text") for cell in cells)
