"""What the user sees while a run goes on: a live bar on a terminal, plain lines in a file, from rank 0 only.

It formats numbers it is given and keeps no state of the run. Messages of other parts go through :func:`say`, so that
they and the bar do not write over each other.
"""

from __future__ import annotations

import io
import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


def format_duration(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    total = max(round(seconds), 0)
    return f"{total // 3600}:{total % 3600 // 60:02d}:{total % 60:02d}"


def progress_line(values: dict[str, float], iteration: int, total: int, eta_seconds: float) -> str:
    """The one line of a logging step.

    Args:
        values: ``loss``, ``lr``, ``grad_norm`` and ``tokens_per_second``; ``reload_wait_ms`` and
            ``overlap_efficiency`` where activations are offloaded.
        iteration: Iterations done, counted from 1.
        total: Iterations of the run.
        eta_seconds: Expected time left.

    Returns:
        A line without a line break.
    """
    reloads = ""
    if "reload_wait_ms" in values:
        reloads = f"reload wait {values['reload_wait_ms']:.1f} ms, overlap {values['overlap_efficiency']:.0%} | "
    return (
        f"iteration {iteration:>{len(str(total))}}/{total} | loss {values['loss']:.4f} | lr {values['lr']:.3e} | "
        f"grad norm {values['grad_norm']:.3f} | {values['tokens_per_second']:,.0f} tokens/s | "
        f"{reloads}ETA {format_duration(eta_seconds)}"
    )


def _bar_numbers(values: dict[str, float], eta_seconds: float) -> str:
    """The same numbers, short enough to stand beside a bar on a terminal of 80 columns."""
    return (
        f"loss {values['loss']:.3f} lr {values['lr']:.1e} norm {values['grad_norm']:.2f} "
        f"{values['tokens_per_second']:,.0f} tok/s ETA {format_duration(eta_seconds)}"
    )


class Monitor:
    """Progress of one run.

    Args:
        style: ``auto`` (bar on a terminal, lines elsewhere), ``bar``, ``plain`` or ``none``.
        enabled: False on all ranks but the first.
        total: Iterations of the whole run.
        start: Iterations already done when this process started.
        stream: Where to write; standard output by default.
    """

    def __init__(self, style: str, *, enabled: bool, total: int, start: int = 0, stream: TextIO | None = None) -> None:
        # Standard output may be closed; then there is nobody to show anything to.
        self._stream = stream or sys.stdout or io.StringIO()
        self._enabled = enabled and style != "none"
        self._say_enabled = enabled
        self._total = total
        self._start = start
        self._start_time = time.perf_counter()
        self._bar: Progress | None = None
        if self._enabled and (style == "bar" or (style == "auto" and self._stream.isatty())):
            self._bar = Progress(
                BarColumn(bar_width=10),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=Console(file=self._stream),
            )
            self._task = self._bar.add_task("training", total=total, completed=start, numbers="")
            self._bar.start()

    def step(self, iteration: int) -> None:
        """Note that an iteration (counted from 1) has ended; moves the bar, prints nothing."""
        if self._bar is not None:
            self._bar.update(self._task, completed=iteration)

    def log(self, iteration: int, values: dict[str, float]) -> None:
        """Show the numbers of a logging step (see :func:`progress_line`)."""
        if not self._enabled:
            return
        done = iteration - self._start
        eta = (time.perf_counter() - self._start_time) / max(done, 1) * (self._total - iteration)
        if self._bar is None:
            print(progress_line(values, iteration, self._total, eta), file=self._stream, flush=True)
        else:
            self._bar.update(self._task, completed=iteration, numbers=_bar_numbers(values, eta))

    def say(self, message: str) -> None:
        """Print a message above the bar (rank 0 only)."""
        if not self._say_enabled:
            return
        if self._bar is None:
            print(message, file=self._stream, flush=True)
        else:
            self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the live bar and leave the cursor on a fresh line. May be called twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
