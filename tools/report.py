#!/usr/bin/env python3
"""Write one HTML page about a run: what it did, how fast, with what, and what it has left.

RUN is the folder that --save named, or one in runs/. The run may have ended, may go on, or may have been killed: the
page shows what is there and says what is not. It holds loss, learning rate, gradient norm, throughput, memory, load of
experts, what the optimisations did, the environment, the configuration and the checkpoints. Pictures are inline SVG,
nothing is loaded from anywhere, and it is readable in a light and in a dark browser.

    python tools/report.py runs/mine
    python tools/report.py runs/mine --output mine.html
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from megatron_glue import __version__
from megatron_glue.config.fields import field_specs
from megatron_glue.proofs.run_folder import RunRecord, Series, read_run
from megatron_glue.proofs.svg_charts import NUM_COLORS, Chart, Line, draw_chart, draw_heat_map
from megatron_glue.training.exit_codes import exit_code_of
from megatron_glue.training.summary import check_writable_file, summary_rows, write_text

ASSETS = Path(__file__).with_name("report_page")
PLANNED = (
    ("Loss", "nats per token", ("loss",), False),
    ("Learning rate", "", ("lr",), True),
    ("Gradient norm", "before clipping", ("grad_norm",), True),
    ("Throughput", "tokens/s, all ranks", ("tokens_per_second",), True),
    ("Step time", "ms", ("step_ms",), True),
    ("Split of a step", "ms, mean of ranks", ("compute_ms", "communication_ms", "data_ms"), True),
    ("Model FLOP/s utilisation", "", ("mfu",), True),
    ("Reloads of activations", "ms per step", ("copy_ms", "reload_wait_ms"), True),
)
"""(title, unit, series, starts at zero) of the charts that every run has."""
SWITCHES = (
    ("packed-metadata cache", "enable_metadata_cache"),
    ("double-buffered reload", "enable_double_buffer"),
    ("one-pass MoE grouping", "enable_grouped_index"),
)

ELSEWHERE = ("config", "provenance", "optimisations")
"""Of ``env.json``: what other sections show."""
MOST_ALARMS = 20


@dataclass
class Page:
    """A page in the making.

    Attributes:
        parts: HTML so far.
        points: What the script reads values from, by chart.
    """

    parts: list[str]
    points: list[dict[str, object]]

    def add_chart(self, chart: Chart) -> str:
        """Draw a chart and remember its points."""
        picture, points = draw_chart(chart)
        index = len(self.points)
        self.points.append(points)
        legend = "".join(
            f'<span><i class="c{number % NUM_COLORS + 1}"></i>{escape(line.name)} <b></b></span>'
            for number, line in enumerate(chart.lines)
        )
        return (
            f'<div class="card" data-chart="{index}"><h3>{escape(chart.title)}<span class="unit">{escape(chart.unit)}'
            f'</span></h3>{picture}<div class="legend">{legend}<span class="step"></span></div></div>'
        )

    def add_section(self, anchor: str, title: str, content: str) -> None:
        """Append a section."""
        self.parts.append(f'<h2 id="{anchor}">{escape(title)}</h2>{content}')


def table(header: Iterable[str], rows: Iterable[Iterable[object]], chosen: Iterable[bool] = ()) -> str:
    """An HTML table; every value but a :class:`Markup` is text and is escaped."""
    marks = iter(chosen)
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{value.html if isinstance(value, Markup) else escape(str(value))}</td>" for value in row)
        kind = ' class="chosen"' if next(marks, False) else ""
        lines.append(f"<tr{kind}>{cells}</tr>")
    return f'<div class="card wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


@dataclass(frozen=True)
class Markup:
    """HTML that this program made, told from text that it was given.

    Attributes:
        html: The text.
    """

    html: str


def tiles(record: RunRecord) -> str:
    """The figures that people look for first."""
    summary, losses = record.summary, record.series.get("loss", {})
    total = record.config.get("training", {}).get("train_iters")
    found = [("iteration", f"{record.iteration:,}", f"of {total:,}" if isinstance(total, int) else "")]
    if losses:
        first, last = next(iter(losses)), list(losses)[-1]
        found.append(("training loss", f"{losses[last]:.4f}", f"{losses[first]:.4f} at iteration {first}"))
    if "heldout_loss" in summary:
        entropy = f"unigram entropy {summary['unigram_entropy']:.4f}" if "unigram_entropy" in summary else ""
        found.append(("held-out loss", f"{summary['heldout_loss']:.4f}", entropy))
    if "tokens_per_second" in summary:
        found.append(("tokens/s", f"{summary['tokens_per_second']:,.0f}", f"{summary.get('ranks', 1)} rank(s)"))
    if "peak_memory_bytes" in summary:
        where = "allocated on one GPU" if str(summary.get("device", "")).startswith("cuda") else "resident, one process"
        found.append(("peak memory", f"{summary['peak_memory_bytes'] / 2**20:,.0f} MiB", where))
    if summary.get("overlap_efficiency") is not None:
        waited = f"{summary.get('reload_wait_ms', 0):,.0f} ms waited in all"
        found.append(("reload overlap", f"{summary['overlap_efficiency']:.0%}", waited))
    if summary.get("skipped_updates"):
        found.append(("skipped updates", str(summary["skipped_updates"]), "loss or gradient not finite"))
    cells = "".join(
        f'<div class="tile"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
        f'<div class="more">{escape(more)}</div></div>'
        for name, value, more in found
    )
    return f'<div class="tiles">{cells}</div>'


def charts(record: RunRecord, page: Page) -> str:
    """The charts of what is known, those of every run first; memory, and what else was logged, behind them."""
    series = dict(record.series)
    heldout = take_heldout(record, series)
    drawn = []
    for title, unit, names, starts_at_zero in PLANNED:
        lines = [Line(name, list(series.pop(name).items())) for name in names if series.get(name)]
        levels: list[tuple[str, float]] = []
        if title == "Loss" and lines:
            lines += [Line("held out", list(heldout.items()), is_dots=True)] if heldout else []
            entropy = record.summary.get("unigram_entropy")
            levels = [("predicting by frequency", entropy)] if isinstance(entropy, float) else []
        if lines:
            drawn.append(page.add_chart(Chart(title, unit, lines, levels, starts_at_zero)))
    drawn += [page.add_chart(chart) for chart in memory_charts(record, series)]
    shown = f'<div class="charts">{"".join(drawn)}</div>'
    others = [page.add_chart(Chart(name, "", [Line(name, list(series[name].items()))])) for name in sorted(series)]
    if others:
        shown += (
            f"<details><summary>{len(others)} more logged values</summary>"
            f'<div class="charts">{"".join(others)}</div></details>'
        )
    return shown


def take_heldout(record: RunRecord, series: dict[str, Series]) -> Series:
    """Held-out losses, logged ones and the last of the summary, taken out of what is left to draw."""
    found = dict(series.pop("heldout_loss", {}))
    if isinstance(last := record.summary.get("heldout_loss"), float):
        found.setdefault(record.iteration, last)
    return dict(sorted(found.items()))


def memory_charts(record: RunRecord, series: dict[str, Series]) -> list[Chart]:
    """What was logged of memory, bytes as MiB, with the peak of the whole run."""
    names = sorted(name for name in series if "memory" in name or "rss" in name)[:NUM_COLORS]
    lines = []
    for name in names:
        scale = 2**20 if name.endswith("_bytes") else 1
        lines.append(Line(name.removesuffix("_bytes"), [(x, y / scale) for x, y in series.pop(name).items()]))
    peak = record.summary.get("peak_memory_bytes")
    levels = [("peak", peak / 2**20)] if isinstance(peak, int) else []
    return [Chart("Memory", "MiB", lines, levels, True)] if lines else []


def expert_load(record: RunRecord) -> str:
    """The heat map and what it says in words."""
    rows = record.expert_shares
    if not rows:
        reason = "the model is dense, or none were logged and the run has not ended"
        return f'<p class="empty">No loads of experts: {reason}.</p>'
    shares = [share for row in rows for share in row]
    dead = sum(share == 0 for share in shares)
    words = (
        "Rows are MoE layers, columns experts; 1.00 is an even share, more is orange, less is blue, none is red. "
        f"Smallest {min(shares):.2f}, largest {max(shares):.2f}, {dead} without any token. "
        f"Dropped: {record.summary.get('dropped_tokens', 'unknown')}."
    )
    return f'<div class="card wide">{draw_heat_map(rows, "MoE layer", "expert")}<p class="empty">{words}</p></div>'


def optimisations(record: RunRecord) -> str:
    """Switches with their state and origin, then the summary's own rows."""
    accelerator = record.config.get("training", {}).get("accelerator", {})
    switches = [
        (name, accelerator[key], "", record.provenance.get(key, "default"))
        for name, key in SWITCHES
        if key in accelerator
    ]
    logged = record.environment.get("optimisations")
    if isinstance(logged, list) and all(isinstance(entry, Mapping) for entry in logged):
        switches = [(e.get("name"), e.get("on"), e.get("reason"), e.get("source")) for e in logged] or switches
    rows = [
        (name, Markup('<span class="on">on</span>' if is_on else '<span class="off">off</span>'), reason, source)
        for name, is_on, reason, source in switches
    ]
    shown = table(("optimisation", "state", "reason", "set by"), rows) if rows else ""
    try:
        counters = summary_rows(record.summary) if record.summary else []
    except (KeyError, TypeError, ValueError, AttributeError):
        # Of another version: nothing is shown rather than something wrong.
        counters = []
    shown += table(("figure", "value"), counters) if counters else ""
    return shown or '<p class="empty">Neither a configuration nor a summary is there.</p>'


def environment(record: RunRecord) -> str:
    """What it ran on and with."""
    rows = [*record.versions.items()]
    if "device" in record.summary:
        rows.append(("device", f"{record.summary['device']}, {record.summary.get('ranks', 1)} rank(s)"))
    # The configuration and the optimisations have sections of their own.
    own = {key: value for key, value in record.environment.items() if key not in ELSEWHERE}
    rows += list(flatten(own))
    return table(("", "value"), rows) if rows else '<p class="empty">Nothing is known of it.</p>'


def flatten(content: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Nested values as (dotted name, text)."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)


def configuration(record: RunRecord) -> str:
    """Values that are no defaults, and behind them all of them by section."""
    if not record.config:
        return '<p class="empty">It stands in checkpoints, and there is none that can be read.</p>'
    values = dict(flatten(record.config))
    by_name = {path.rpartition(".")[2]: path for path in values}
    chosen = [
        (field_specs()[name].flag if name in field_specs() else name, values[by_name[name]], source)
        for name, source in record.provenance.items()
        if name in by_name and source != "default"
    ]
    shown = (
        table(("flag", "value", "set by"), chosen) if chosen else '<p class="empty">All values are the defaults.</p>'
    )
    rows = list(values.items())
    marks = [path.rpartition(".")[2] in record.provenance for path, _ in rows]
    return (
        f"{shown}<details><summary>All {len(rows)} values</summary>{table(('field', 'value'), rows, marks)}</details>"
    )


def checkpoints(record: RunRecord) -> str:
    """Published checkpoints, newest last."""
    if not record.saved:
        return '<p class="empty">None.</p>'
    rows = []
    for saved in record.saved:
        if saved.damage:
            rows.append((str(saved.step), "", "", Markup(f'<span class="bad">{escape(saved.damage)}</span>')))
        else:
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(saved.saved_at))
            rows.append((str(saved.step), f"{saved.num_bytes / 2**20:,.1f} MiB", when, saved.layout))
    return table(("step", "size", "saved", "layout"), rows)


def build_page(record: RunRecord) -> str:
    """The whole page.

    Args:
        record: What is known of the run.

    Returns:
        HTML that needs nothing else.
    """
    page = Page([], [])
    page.parts.append(tiles(record))
    alarms = [f"iteration {iteration}: {line}" for iteration, line in record.alarms]
    if len(alarms) > MOST_ALARMS:
        alarms = [f"{len(alarms)} alarms, the last {MOST_ALARMS}:", *alarms[-MOST_ALARMS:]]
    for kind, lines in (("alarms", alarms), ("notes", record.notes)):
        if lines:
            page.parts.append(f'<div class="{kind}">{"".join(f"<p>{escape(line)}</p>" for line in lines)}</div>')
    sections = (
        ("course", "Course", charts(record, page)),
        ("experts", "Expert load", expert_load(record)),
        ("optimisations", "Optimisations and counters", optimisations(record)),
        ("environment", "Environment", environment(record)),
        ("configuration", "Configuration", configuration(record)),
        ("checkpoints", "Checkpoints", checkpoints(record)),
    )
    for section in sections:
        page.add_section(*section)
    nav = "".join(f'<a href="#{anchor}">{escape(title)}</a>' for anchor, title, _ in sections)
    style, script = ((ASSETS / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # Nothing may be fetched, and no script runs but this one, whatever stands in a run's own texts.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    points = json.dumps(page.points, allow_nan=False).replace("<", "\\u003c")
    title = escape(f"{record.name}, iteration {record.iteration}")
    where = escape(f"{record.folder.resolve()} · written {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="generator" content="megatron_glue {__version__}"><title>{title}</title>'
        f"<style>{style}</style></head><body><main><header><h1>{escape(record.name)}</h1>"
        f'<span class="where">{where}</span><button id="theme" type="button">light / dark</button></header>'
        f"<nav>{nav}</nav>{''.join(page.parts)}</main>"
        f'<script type="application/json" id="points">{points}</script><script>{script}</script></body></html>\n'
    )


def run() -> int:
    """Read, write, say where."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("--output", metavar="F", help="page to write (default RUN/report.html)")
    arguments = parser.parse_args()
    record = read_run(Path(arguments.run))
    output = Path(arguments.output or record.folder / "report.html")
    check_writable_file(output, "--output")
    write_text(output, build_page(record))
    print(f"wrote {output}")
    return 0


def main() -> int:
    """Entry point with one-line errors."""
    return exit_code_of(run)


if __name__ == "__main__":
    raise SystemExit(main())
