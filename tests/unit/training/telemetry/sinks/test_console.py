from __future__ import annotations

import io

from megatron_glue.training.monitor import Monitor
from megatron_glue.training.telemetry.record import MetricRecord
from megatron_glue.training.telemetry.sinks.console import ConsoleSink

VALUES = {"loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 10.0, "reload_wait_ms": 0.5, "step_ms": 3.0}


def shown(record: MetricRecord) -> str:
    stream = io.StringIO()
    ConsoleSink(Monitor("plain", enabled=True, total=9, stream=stream)).write(record)
    return stream.getvalue()


def test_the_progress_line_and_alarms() -> None:
    line = shown(MetricRecord(4, 0.0, VALUES, alarms=("alarm: x",)))
    assert line.startswith("iteration 4: alarm: x\niteration 4/9 | loss 2.0000")
    assert "reload" not in line, "nothing was brought back"
    assert "overlap 50%" in shown(MetricRecord(4, 0.0, {**VALUES, "overlap_efficiency": 0.5}))


def test_an_evaluation_is_told_elsewhere() -> None:
    assert shown(MetricRecord(4, 0.0, {"heldout_loss": 2.0})) == ""
