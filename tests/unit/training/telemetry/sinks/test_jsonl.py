from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_glue.training.telemetry.record import MetricRecord
from megatron_glue.training.telemetry.sinks.jsonl import JsonlSink, read_records

RECORD = MetricRecord(
    3, 12.5, {"loss": float("nan"), "lr": 0.1}, {"dead_experts": {0: 1.0}}, {0: [0.123456, 1.0]}, ("alarm: x",)
)


def test_a_record_is_a_line_of_json(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "new" / "metrics.jsonl")
    sink.write(RECORD)
    (line,) = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "iteration": 3,
        "time": 12.5,
        "loss": None,
        "lr": 0.1,
        "dead_experts": {"0": 1.0},
        "expert_load": {"0": [0.1235, 1.0]},
        "alarms": ["alarm: x"],
    }
    sink.close()


def test_records_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(RECORD)
    sink.close()
    path.write_text(path.read_text() + '{"iteration": 4, "time": 1, "of_a_later_version": 1}\n{"itera')
    first, second = read_records(path)
    assert first == MetricRecord(3, 12.5, {"lr": 0.1}, {"dead_experts": {0: 1.0}})
    assert second == MetricRecord(4, 1.0, {})
    assert list(read_records(tmp_path)) == []


def test_a_resumed_run_goes_on_behind_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iterat')
    sink = JsonlSink(path)
    sink.write(RECORD)
    sink.close()
    assert path.read_text().splitlines()[:2] == ['{"iteration": 1}', '{"iterat']
    assert json.loads(path.read_text().splitlines()[2])["iteration"] == 3
    JsonlSink(path).close()
    assert path.read_text().count("\n") == 3, "nothing is added where the last line is whole"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        JsonlSink(tmp_path)
