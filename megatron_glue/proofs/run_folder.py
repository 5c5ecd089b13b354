"""Reads what a run has left in its folder, for people who look at it later or while it goes on. It changes nothing.

Sources, each of which may be missing: ``summary.json`` (written at the end), ``metrics*.jsonl`` (a record per logging
step), checkpoints (losses and gradient norms of every step up to the newest) and ``env.json`` (of the newest start);
the last two know the configuration and where it came from. What is missing or damaged becomes a note, since a report is
wanted most where a run went wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import from_dict
from megatron_glue.training.checkpoint import files
from megatron_glue.training.lr_schedule import LearningRateSchedule

SUMMARY_NAME, ENVIRONMENT_NAME, METRICS_PATTERN = "summary.json", "env.json", "metrics*.jsonl"
FACTS_NAME = "meta.json"

Series = dict[int, float]
"""Iteration, counted from 1 -> value."""


@dataclass(frozen=True)
class SavedStep:
    """A published checkpoint.

    Attributes:
        step: Optimizer steps made.
        num_bytes: Of all its files.
        saved_at: Seconds since the epoch.
        layout: Of the ranks that wrote it.
        damage: What is wrong with it; empty for nothing that shows without reading tensors.
    """

    step: int
    num_bytes: int
    saved_at: float
    layout: str
    damage: str = ""


@dataclass
class RunRecord:
    """What is known of a run.

    Attributes:
        folder: Where it was found.
        name: Of the run.
        iteration: Newest iteration that is known.
        series: Values by name and iteration.
        summary: Content of ``summary.json``; empty for a run that has not ended.
        environment: Content of ``env.json``.
        config: The configuration, by section.
        provenance: Field -> source, of values that are no defaults.
        versions: Of this project and of torch, as the newest checkpoint names them.
        saved: Checkpoints, oldest first.
        expert_shares: Load by MoE layer and expert as multiples of an even share: of the last process' steps from the
            summary, else of the newest record; empty for a dense model or if unknown.
        alarms: (iteration, line) of the alarms that were logged.
        notes: What is missing or damaged, a line each.
    """

    folder: Path
    name: str
    iteration: int = 0
    series: dict[str, Series] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    saved: list[SavedStep] = field(default_factory=list)
    expert_shares: list[list[float]] = field(default_factory=list)
    alarms: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder.

    Args:
        folder: What ``--save`` named, or ``runs/NAME-TIME``.

    Returns:
        The record.

    Raises:
        ConfigError: If there is nothing of a run in it.
    """
    if not folder.is_dir():
        raise ConfigError("RUN", folder, "is no folder", "give what --save named, or a folder in runs/")
    record = RunRecord(folder, folder.resolve().name)
    record.summary = _read_mapping(folder / SUMMARY_NAME, record)
    record.environment = _read_mapping(folder / ENVIRONMENT_NAME, record)
    logged = _read_metrics(folder, record)
    facts = _read_checkpoints(folder, record)
    if not (record.summary or facts or logged):
        reason = f"holds no checkpoint, {SUMMARY_NAME} or {METRICS_PATTERN}"
        raise ConfigError("RUN", folder, reason, "give what --save named, or a folder in runs/")
    _fill(record, facts, logged)
    return record


def _fill(record: RunRecord, facts: dict[str, Any], logged: dict[str, Series]) -> None:
    """Put the sources together. What is written last knows most: the log beats the summary, and that a checkpoint."""
    summary = record.summary
    record.name = str(summary.get("name") or record.name)
    started = record.environment
    record.config = started.get("config") or facts.get("config") or {}
    record.provenance = started.get("provenance") or facts.get("provenance") or {}
    record.versions = {"megatron_glue": facts["version"], "torch": facts["torch"]} if facts else {}
    for source in (facts.get("counters") or {}, summary):
        for key, name in (("losses", "loss"), ("grad_norms", "grad_norm")):
            record.series.setdefault(name, {}).update(_numbered(source.get(key)))
    record.series |= _rates(summary)
    for name, values in logged.items():
        record.series.setdefault(name, {}).update(values)
    record.series = {name: dict(sorted(values.items())) for name, values in record.series.items() if values}
    newest = [max(values) for values in record.series.values()]
    record.iteration = max([*newest, int(summary.get("iterations") or 0), *(saved.step for saved in record.saved)])
    if "lr" not in record.series:
        record.series |= _planned_rates(record)
    counts = summary.get("expert_counts")
    if isinstance(counts, list) and all(map(_is_row, counts)):
        shares = [[count * len(row) / sum(row) for count in row] for row in counts if sum(row)]
        record.expert_shares = shares or record.expert_shares


def _numbered(values: Any, first: int = 1) -> Series:
    """A list with one number per step, the first of which is ``first``."""
    if not isinstance(values, list):
        return {}
    return {first + index: float(value) for index, value in enumerate(values) if _is_number(value)}


def _rates(summary: dict[str, Any]) -> dict[str, Series]:
    """Throughput and reloads of the last process' steps. Its first step is warm-up and is left out of the rates."""
    times = summary.get("step_times_s") or []
    first = int(summary.get("iterations") or 0) - len(times) + 1
    tokens = summary.get("step_tokens")
    if not isinstance(tokens, list) or len(tokens) != len(times):
        mean = (summary.get("tokens") or 0) / max(int(summary.get("iterations") or 0), 1)
        tokens = [mean] * len(times)
    rates = [count / seconds if seconds else math.nan for count, seconds in zip(tokens, times, strict=True)]
    found = {
        "tokens_per_second": _numbered(rates[1:], first + 1),
        "step_ms": _numbered([1e3 * s for s in times], first),
    }
    steps = summary.get("reload_steps") or []
    for key in ("copy_ms", "reload_wait_ms"):
        found[key] = _numbered([step.get(key) for step in steps], first)
    return {name: values for name, values in found.items() if values}


def _planned_rates(record: RunRecord) -> dict[str, Series]:
    """The learning rate as the configuration says, where nobody has logged it."""
    skipped = int(record.summary.get("skipped_updates") or 0)
    if not record.config or skipped:
        return {}
    try:
        config = from_dict(record.config)
        schedule = LearningRateSchedule(config.optimizer, config.training.train_iters)
    except ConfigError:
        return {}
    record.notes.append("the learning rate is computed from the configuration, it was not logged")
    return {"lr": {iteration: schedule.at(iteration - 1) for iteration in range(1, record.iteration + 1)}}


def _read_mapping(path: Path, record: RunRecord) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        record.notes.append(f"{path.name} is not there" + (", the run has not ended" if path.stem == "summary" else ""))
        return {}
    except (OSError, ValueError, RecursionError) as error:
        record.notes.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(content, dict):
        record.notes.append(f"{path.name} holds no mapping")
        return {}
    return content


def _read_metrics(folder: Path, record: RunRecord) -> dict[str, Series]:
    """Numbers of all records. A resumed run repeats iterations: the later record counts."""
    series: dict[str, Series] = {}
    num_bad = 0
    for path in sorted(folder.glob(METRICS_PATTERN)):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
                iteration = entry.pop("iteration")
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
                # A killed process leaves half a line.
                num_bad += bool(line.strip())
                continue
            if isinstance(iteration, int):
                _take_loads(entry.pop("expert_load", None), record)
                record.alarms += [(iteration, str(alarm)) for alarm in entry.pop("alarms", None) or []]
                for name, value in _numbers(entry):
                    series.setdefault(name, {})[iteration] = value
    if num_bad:
        record.notes.append(f"{num_bad} lines of {METRICS_PATTERN} are no records")
    return series


def _take_loads(loads: Any, record: RunRecord) -> None:
    """A record's load of experts by layer; the newest stays."""
    if isinstance(loads, Mapping) and all(str(layer).isdigit() and _is_row(row) for layer, row in loads.items()):
        record.expert_shares = [[*map(float, loads[layer])] for layer in sorted(loads, key=int)] or record.expert_shares


def _numbers(entry: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record, those of inner mappings with dotted names; times are no measurements."""
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif _is_number(value) and name not in ("time", "timestamp"):
            yield prefix + name, float(value)


def _read_checkpoints(folder: Path, record: RunRecord) -> dict[str, Any]:
    """Facts of the newest checkpoint that can be read; all are listed."""
    newest: dict[str, Any] = {}
    for step in sorted(files.published_steps(folder)):
        path = files.step_folder(folder, step)
        try:
            facts = files.read_json(path / FACTS_NAME)
            num_bytes = sum(files.listed_sizes(path).values())
            saved = SavedStep(step, num_bytes, path.stat().st_mtime, str(facts["layout"]))
            newest = facts if {"version", "torch"} <= facts.keys() else newest
        except (files.CheckpointError, OSError, LookupError, TypeError, AttributeError) as error:
            saved = SavedStep(step, 0, 0.0, "", " ".join(str(error).split()) or type(error).__name__)
        record.saved.append(saved)
    if not record.saved:
        record.notes.append("there is no checkpoint")
    return newest


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_row(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))
