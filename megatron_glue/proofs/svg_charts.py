"""Draws lines and heat maps as SVG text that stands in a page: no library, no network, colours left to the page.

Classes name what a thing is (``line``, ``axis``, ``grid``), and lines are numbered by the classes ``c1`` to ``c4``; the
page's style gives them colours, so one picture serves a light and a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 30
MAX_POINTS = 600
"""More are put together, so that a page of a million steps stays small."""
NUM_COLORS = 4
_CELL, _MAX_CELL = 9, 34
_LABELLED_CELL = 26


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: For the legend.
        points: (x, y), x rising; values that are not finite leave a gap.
        is_dots: Draw points instead of a line.
    """

    name: str
    points: Sequence[tuple[float, float]]
    is_dots: bool = False


@dataclass(frozen=True)
class Chart:
    """What is drawn in one pair of axes.

    Attributes:
        title: For people.
        unit: Of y.
        lines: The lines, at most ``NUM_COLORS``.
        levels: Dashed horizontal lines: (name, y).
        starts_at_zero: Whether y begins at 0.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    levels: Sequence[tuple[str, float]] = field(default_factory=tuple)
    starts_at_zero: bool = False


@dataclass(frozen=True)
class Point:
    """One or several steps of a line.

    Attributes:
        x: The last of the steps.
        mean: Of the values.
        low: The smallest.
        high: The largest.
    """

    x: float
    mean: float
    low: float
    high: float


def thin_out(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> list[Point]:
    """Put neighbouring points together until there are at most ``limit``; what is not finite stays and makes a gap."""
    size = max(1, math.ceil(len(points) / limit))
    thinned = []
    for start in range(0, len(points), size):
        some = points[start : start + size]
        finite = [y for _, y in some if math.isfinite(y)]
        mean = math.fsum(finite) / len(finite) if finite else math.nan
        thinned.append(Point(some[-1][0], mean, min(finite, default=math.nan), max(finite, default=math.nan)))
    return thinned


def ticks(low: float, high: float, number: int = 5) -> list[float]:
    """Round values inside a range, about ``number`` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / max(number, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number as an axis shows it."""
    size = abs(value)
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    for limit, divisor, suffix in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / divisor:.4g}{suffix}"
    return f"{value:.4g}" if size >= 1e-2 else f"{value:.1e}"


class _Scale:
    """From values to places in the picture."""

    def __init__(self, chart: Chart, lines: Sequence[list[Point]]) -> None:
        xs = [point.x for points in lines for point in points]
        ys = [y for points in lines for point in points for y in (point.low, point.high) if math.isfinite(y)]
        ys += [y for _, y in chart.levels] + ([0.0] if chart.starts_at_zero else [])
        self.left, self.right = min(xs, default=0.0), max(xs, default=1.0)
        self.low, self.high = min(ys, default=0.0), max(ys, default=1.0)
        if self.right == self.left:
            self.left, self.right = self.left - 0.5, self.right + 0.5
        # A line that never moves stands in the middle.
        room = (self.high - self.low) * 0.06 or abs(self.high) * 0.1 or 1.0
        self.high += room
        self.low = 0.0 if chart.starts_at_zero and self.low == 0 else self.low - room

    def x(self, value: float) -> float:
        return LEFT + (value - self.left) / (self.right - self.left) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def draw_chart(chart: Chart) -> tuple[str, dict[str, object]]:
    """Draw a chart.

    Args:
        chart: With at least one point.

    Returns:
        The SVG, and what a page needs to read values off it: names, classes, and the points with their places.
    """
    lines = [thin_out(line.points) for line in chart.lines]
    scale = _Scale(chart, lines)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title, quote=True)}">',
        *_axes(scale),
    ]
    for name, y in chart.levels:
        place = scale.y(y)
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(f'<text class="level-name" x="{WIDTH - RIGHT - 4}" y="{place - 5:.1f}">{escape(name)}</text>')
    hover = []
    for index, (line, points) in enumerate(zip(chart.lines, lines, strict=True)):
        color = f"c{index % NUM_COLORS + 1}"
        parts += _dots(points, scale, color) if line.is_dots else _line(points, scale, color)
        places = [
            [point.x, round(scale.x(point.x), 1), short(point.mean), round(scale.y(point.mean), 1)]
            for point in points
            if math.isfinite(point.mean)
        ]
        hover.append({"name": line.name, "color": color, "points": places})
    parts.append(f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>')
    return "".join(parts), {"unit": chart.unit, "lines": hover}


def _axes(scale: _Scale) -> list[str]:
    parts = []
    for value in ticks(scale.low, scale.high):
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="y" x="{LEFT - 7}" y="{y + 4:.1f}">{short(value)}</text>')
    for value in ticks(scale.left, scale.right, 6):
        if value != int(value):
            continue
        x = scale.x(value)
        parts.append(f'<text class="x" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}">{short(value)}</text>')
    bottom = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    return parts


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """Stretches without a gap."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point.mean):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _line(points: Sequence[Point], scale: _Scale, color: str) -> list[str]:
    parts = []
    for run in _runs(points):
        if len(run) == 1:
            parts += _dots(run, scale, color)
            continue
        if any(point.high > point.low for point in run):
            edge = [(point.x, point.high) for point in run] + [(point.x, point.low) for point in reversed(run)]
            parts.append(f'<polygon class="band {color}" points="{_places(edge, scale)}"/>')
        parts.append(f'<polyline class="line {color}" points="{_places([(p.x, p.mean) for p in run], scale)}"/>')
    return parts


def _dots(points: Sequence[Point], scale: _Scale, color: str) -> list[str]:
    return [
        f'<circle class="dot {color}" cx="{scale.x(point.x):.1f}" cy="{scale.y(point.mean):.1f}" r="3.5"/>'
        for point in points
        if math.isfinite(point.mean)
    ]


def _places(points: Sequence[tuple[float, float]], scale: _Scale) -> str:
    return " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in points)


def draw_heat_map(rows: Sequence[Sequence[float]], row_name: str, column_name: str) -> str:
    """Draw shares as cells: 1 is an even share and has no colour, less is class ``less``, more is ``more``.

    Args:
        rows: Shares by row and column; columns may be fewer in some rows.
        row_name: What a row is, e.g. ``MoE layer``.
        column_name: What a column is.

    Returns:
        The SVG; each cell tells its value when pointed at.
    """
    num_columns = max(len(row) for row in rows)
    cell = max(_CELL, min(_MAX_CELL, 900 // num_columns))
    left, top = 34, 22
    width, height = left + num_columns * cell + 2, top + len(rows) * cell + 2
    parts = [
        f'<svg class="heat" viewBox="0 0 {width} {height}" style="max-width:{round(width * 1.3)}px" role="img" '
        f'aria-label="{escape(column_name)} load by {escape(row_name)}">'
    ]
    every = max(1, math.ceil(24 / cell))
    for column in range(0, num_columns, every):
        parts.append(f'<text class="x" x="{left + (column + 0.5) * cell:.1f}" y="{top - 7}">{column}</text>')
    for index, row in enumerate(rows):
        y = top + index * cell
        if index % every == 0:
            parts.append(f'<text class="y" x="{left - 6}" y="{y + cell / 2 + 4:.1f}">{index}</text>')
        for column, share in enumerate(row):
            x = left + column * cell
            # Twice the even share, or nothing at all, is the full colour.
            strength = min(abs(share - 1.0), 1.0)
            kind = "dead" if share == 0 else "more" if share > 1 else "less"
            title = f"{row_name} {index}, {column_name} {column}: {share:.2f} of an even share"
            parts.append(
                f'<g class="cell {kind}"><rect class="ground" x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}"/>'
                f'<rect x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}" fill-opacity="{strength:.2f}"/>'
                f"<title>{escape(title)}</title>"
            )
            if cell >= _LABELLED_CELL:
                parts.append(f'<text x="{x + (cell - 1) / 2}" y="{y + cell / 2 + 3.5:.1f}">{share:.2f}</text>')
            parts.append("</g>")
    return "".join(parts) + "</svg>"
