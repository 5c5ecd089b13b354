"""Loads matplotlib for the tools that draw, and says in one line when it is absent. It draws nothing itself.

Stands below the reports in this room; nothing else of the project needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_glue.config.errors import ConfigError

DPI = 110
COLORS = {
    "compute": "#2c7fb8",
    "glue": "#d95f0e",
    "copy": "#8856a7",
    "communication": "#636363",
    "input": "#c51b8a",
    "optimizer": "#41ab5d",
}
"""Of the categories of a step's time, the same in every picture."""


def load_pyplot(flag: str, value: object) -> Any:
    """Return ``matplotlib.pyplot`` with the backend that needs no display; call it before work whose end is a picture.

    Args:
        flag: What the user asked for the picture with.
        value: Its value.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            flag, value, "draws with matplotlib, which is not installed", "run pip install -e '.[bench]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    return pyplot


def save_figure(pyplot: Any, figure: Any, path: Path) -> None:
    """Write a figure and free it.

    Args:
        pyplot: From :func:`load_pyplot`.
        figure: Made by it.
        path: Its ending chooses the format.
    """
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table.

    Args:
        header: Column titles; the first column is aligned left, the others right.
        rows: Cells.
    """
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])
