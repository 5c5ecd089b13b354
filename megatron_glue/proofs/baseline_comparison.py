"""Two baselines beside each other: what must be equal, what may not get worse, and what else changed between them.

The judgement is ``gate.py``'s; this adds the versions, packages and settings that differ, which is where a regression
is looked for first. It runs nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from megatron_glue.config.sections import RunConfig
from megatron_glue.proofs.baselines import Record
from megatron_glue.proofs.gate import Figure, Judgement, Thresholds, check_same_run, judge, performance_limits
from megatron_glue.proofs.gate_run import compared_settings
from megatron_glue.proofs.packages import ABSENT, changed_packages


@dataclass(frozen=True)
class Comparison:
    """What came out.

    Attributes:
        then: Name of the baseline.
        now: Name of what was held against it.
        figures: One per comparison.
        performance: Whether throughput and memory were judged, and why.
        versions: Changed versions beside packages, a line each.
        packages: Changed packages, a line each.
        settings: Changed settings of those that may differ, a line each.
    """

    then: str
    now: str
    figures: list[Figure]
    performance: str
    versions: list[str]
    packages: list[str]
    settings: list[str]

    @property
    def num_failed(self) -> int:
        """Figures beyond their limit."""
        return sum(figure.is_failed for figure in self.figures)

    def as_record(self) -> dict[str, Any]:
        """JSON values; a limit that is not judged is ``None``."""
        figures = [
            {
                **dataclasses.asdict(figure),
                "difference": figure.difference if math.isfinite(figure.difference) else None,
                "allowed": figure.allowed if math.isfinite(figure.allowed) else None,
                "failed": figure.is_failed,
            }
            for figure in self.figures
        ]
        return {**dataclasses.asdict(self), "figures": figures, "passed": self.num_failed == 0}

    def changes(self) -> Iterator[str]:
        """Yield what changed, for people; packages that came or went are counted only."""
        ends = [line.split(" ", 1)[1].split(" -> ") for line in self.packages]
        changed = [line for line, end in zip(self.packages, ends, strict=True) if ABSENT not in end]
        for number, what in ((sum(e[0] == ABSENT for e in ends), "new"), (sum(e[1] == ABSENT for e in ends), "gone")):
            if number:
                changed.append(f"{number} {what}")
        for title, lines in (
            ("versions", self.versions),
            ("packages", changed),
            ("settings that may differ", self.settings),
        ):
            yield f"{title}: {', '.join(lines) if lines else 'none changed'}"


def check_comparable(now: Mapping[str, Any], then: Record, asked_by: str) -> None:
    """Refuse to compare what is not the same run.

    Args:
        now: ``gate_run.described_run`` of what is to be judged.
        then: The baseline.
        asked_by: Flag or word that named it.

    Raises:
        ConfigError: For the first difference of settings, data, seed or ranks.
    """
    check_same_run(now, then.observed["run"], compared_settings(RunConfig()), asked_by)


def compare(then: Record, now: Record, limits: Thresholds, judgement: Judgement) -> Comparison:
    """Compare two records of the same run.

    Args:
        then: The baseline.
        now: What is held against it.
        limits: What may differ.
        judgement: When throughput and memory refuse.

    Returns:
        Figures and changes.
    """
    limits, performance = performance_limits(now.observed, then.observed, limits, judgement)
    versions = [record.environment.get("software", {}) for record in (then, now)]
    settings = [dict(_flat(record.environment.get("config", {}))) for record in (then, now)]
    return Comparison(
        then.name,
        now.name,
        judge(now.observed, then.observed, limits),
        performance,
        list(_changes(*versions)),
        changed_packages(then.packages, now.packages),
        list(_changes(*settings)),
    )


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(then.keys() | now.keys()):
        before, after = then.get(name, ABSENT), now.get(name, ABSENT)
        if before != after:
            yield f"{name} {before} -> {after}"


def _flat(section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields of all sections; their names are unique."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield name, value


def gate_table(figures: list[Figure], title: str) -> Table:
    """Show every figure, the failing ones marked.

    Args:
        figures: Compared ones.
        title: Of the table.
    """
    table = Table(title=title, title_justify="left")
    for column in ("figure", "baseline", "now", "difference", "allowed", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right", overflow="fold")
    for figure in figures:
        cells = (figure.name, figure.baseline, figure.observed, f"{figure.difference:+.1e}")
        is_judged = math.isfinite(figure.allowed)
        verdict = "FAILED" if figure.is_failed else "ok" if is_judged else "reported"
        table.add_row(*cells, f"{figure.allowed:.1e}" if is_judged else "any", verdict)
    return table


def records_table(records: list[Record], title: str) -> Table:
    """Show the key figures of records, one a row.

    Args:
        records: In the order to show.
        title: Of the table.
    """
    table = Table(title=title, title_justify="left")
    for column in ("record", "made (UTC)", "torch", "device", "ranks", "last loss", "held-out", "tokens/s", "memory"):
        table.add_column(column, overflow="fold")
    for record in records:
        observed, environment = record.observed, record.environment
        table.add_row(
            record.name,
            str(environment.get("started", "")).removesuffix("Z").replace("T", " "),
            str(environment.get("software", {}).get("torch", "")),
            str(environment.get("device", "")),
            str(observed["run"].get("ranks", "")),
            f"{observed['losses'][-1]:.5f}",
            f"{observed['heldout'][0]:.5f}",
            f"{observed['tokens_per_second']:,.0f}",
            f"{observed['peak_memory_bytes'] / 2**20:,.0f} MiB",
        )
    return table
