from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.training.telemetry.record import MetricRecord
from megatron_glue.training.telemetry.sinks.tensorboard import TensorBoardSink


def test_scalars_by_group_and_layer_and_a_resume_replaces_points(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install '.[metrics]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def write(first: int, *iterations: int) -> None:
        sink = TensorBoardSink(tmp_path, first)
        for iteration in iterations:
            sink.write(MetricRecord(iteration, 1.0, {"loss": iteration + first / 10}, {"dead_experts": {3: 2.0}}))
        sink.close()

    write(1, 1, 2, 3)
    write(3, 3, 4)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(each.step, round(each.value, 1)) for each in events.Scalars("training/loss")] == [
        (1, 1.1),
        (2, 2.1),
        (3, 3.3),
        (4, 4.3),
    ]
    assert events.Scalars("experts/dead_experts/layer_3")[0].value == 2.0


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"--tensorboard-dir.*not installed.*megatron_glue\[metrics\]"):
        TensorBoardSink(tmp_path, 1)
