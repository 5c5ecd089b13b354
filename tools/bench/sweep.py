"""A table of ``tools/bench/scaling.py``: what it comes down to, and how it is shown. It measures nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_glue.proofs.pictures import markdown_table, save_figure


@dataclass(frozen=True)
class Sweep:
    """One table.

    Attributes:
        name: Title.
        variable: Name of the first column.
        columns: Names of the others, with units.
        values: First column.
        rows: One per value, a number per column.
        figures: By name, what the table comes down to.
        limits: Of some figures, the most they may be.
    """

    name: str
    variable: str
    columns: tuple[str, ...]
    values: tuple[int | str, ...]
    rows: tuple[tuple[float, ...], ...]
    figures: dict[str, float]
    limits: dict[str, float | None]

    def judge(self) -> list[str]:
        """One line per figure above its limit."""
        return [
            f"FAILED {self.name}: {name} is {self.figures[name]:.3f}, allowed {limit:.3f}"
            for name, limit in self.limits.items()
            # Not ">": a NaN is above every limit.
            if limit is not None and not self.figures[name] <= limit
        ]


def fitted_exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """Slope of the line through (log size, log time) by least squares: time grows as size to this power.

    Raises:
        ValueError: With fewer than two different sizes.
    """
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(time) for time in times]).slope


def max_to_min(values: Sequence[float]) -> float:
    """Largest / smallest."""
    return max(values) / min(values)


def print_sweep(sweep: Sweep, console: Console) -> None:
    """A table, and its figures below."""
    table = Table(title=sweep.name, title_justify="left")
    for column in (sweep.variable, *sweep.columns):
        table.add_column(column, justify="right", no_wrap=True)
    for value, row in zip(sweep.values, sweep.rows, strict=True):
        table.add_row(str(value), *(f"{number:,.3f}" for number in row))
    console.print(table)
    for name, figure in sweep.figures.items():
        console.print(f"{name}: {figure:.3f}", highlight=False)


def markdown(sweeps: Sequence[Sweep], title: str) -> str:
    """The same as Markdown."""
    parts = [f"{title}.\n"]
    for sweep in sweeps:
        header = [sweep.variable, *sweep.columns]
        cells = [
            [str(value), *(f"{number:,.3f}" for number in row)]
            for value, row in zip(sweep.values, sweep.rows, strict=True)
        ]
        parts.append(f"\n{sweep.name}:\n\n{markdown_table(header, cells)}\n")
        parts.append("\n" + "; ".join(f"{name}: {figure:.3f}" for name, figure in sweep.figures.items()) + ".\n")
    return "".join(parts)


def draw(pyplot: Any, sweeps: Sequence[Sweep], title: str, path: str) -> None:
    """Draw one panel per table, its times only; over numbers both axes are logarithmic: a power law is a line.

    Args:
        pyplot: ``matplotlib.pyplot``.
        sweeps: The tables.
        title: Above the picture.
        path: Its ending chooses the format.

    Raises:
        OSError: If the picture cannot be written.
    """
    figure, panels = pyplot.subplots(
        1, len(sweeps), figsize=(5.5 * len(sweeps), 4), squeeze=False, layout="constrained"
    )
    for axes, sweep in zip(panels[0], sweeps, strict=True):
        for index, column in enumerate(sweep.columns):
            if "MiB" not in column and "/" not in column:
                axes.plot(range(len(sweep.values)), [row[index] for row in sweep.rows], marker="o", label=column)
        axes.set_xticks(range(len(sweep.values)), [str(value) for value in sweep.values])
        axes.set_yscale("log")
        axes.set_title(sweep.name, loc="left", fontsize=8)
        axes.set_xlabel(sweep.variable)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    save_figure(pyplot, figure, Path(path))
