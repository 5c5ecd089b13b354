"""Adds records to a file, one JSON object a line.

A run that resumes goes on in the same file and may repeat iterations that it had lost: the later line counts. Each line
is written at once, so that a kill costs at most the line that is being written; the next start closes it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_glue.training.telemetry.record import SPECS, MetricRecord


class JsonlSink:
    """A file of records.

    Args:
        path: The file; it and its folder are made if missing.

    Raises:
        OSError: If it cannot be written.
    """

    name = "JSONL"

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        needs_end = _ends_in_half_a_line(path)
        self._file = path.open("a", encoding="utf-8")
        if needs_end:
            self._file.write("\n")
            self._file.flush()

    def write(self, record: MetricRecord) -> None:
        """Add a line: ``iteration``, ``time``, every figure by name, those of layers as mappings, ``alarms``."""
        self._file.write(json.dumps(as_json(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def as_json(record: MetricRecord) -> dict[str, Any]:
    """A record as JSON values; what is no finite number becomes null."""
    content: dict[str, Any] = {"iteration": record.iteration, "time": record.time_s}
    content |= {name: _number(value) for name, value in record.values.items()}
    for name, of_layer in record.by_layer.items():
        content[name] = {str(layer): _number(value) for layer, value in of_layer.items()}
    if record.expert_load:
        content["expert_load"] = {
            str(layer): [round(load, 4) for load in row] for layer, row in record.expert_load.items()
        }
    if record.alarms:
        content["alarms"] = list(record.alarms)
    return content


def read_records(path: Path) -> Iterator[MetricRecord]:
    """Read a file of records back, in its order.

    Args:
        path: The file; one that cannot be read has no records.

    Yields:
        Records without loads and alarms. Half a line, and figures that this version does not know, are left out.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            entry = json.loads(line)
            iteration, time_s = int(entry["iteration"]), float(entry["time"])
        except (ValueError, LookupError, TypeError):
            continue
        values: dict[str, float] = {}
        by_layer: dict[str, dict[int, float]] = {}
        for name, value in entry.items():
            if name not in SPECS or value is None:
                continue
            if SPECS[name].is_by_layer:
                by_layer[name] = {int(layer): each for layer, each in value.items() if each is not None}
            else:
                values[name] = value
        yield MetricRecord(iteration, time_s, values, by_layer)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ends_in_half_a_line(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
