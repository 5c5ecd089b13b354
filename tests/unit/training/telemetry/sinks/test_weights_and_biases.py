from __future__ import annotations

import inspect
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.training.telemetry.record import MetricRecord
from megatron_glue.training.telemetry.sinks import weights_and_biases
from megatron_glue.training.telemetry.sinks.weights_and_biases import WandbSink


class StandInRun:
    """Has the methods of ``wandb.Run`` that the sink uses, with their signatures."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.axes: list[tuple[str, str | None]] = []
        self.alerts: list[str] = []
        self.is_finished = False

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert step is not None
        assert not self.logged or step > self.logged[-1][1], "wandb drops what does not grow"
        self.logged.append((data, step))

    def define_metric(self, name: str, step_metric: str | None = None, step_sync: bool | None = None) -> None:
        self.axes.append((name, step_metric))

    def alert(self, title: str, text: str) -> None:
        self.alerts.append(text)

    def finish(self, exit_code: int | None = None) -> None:
        self.is_finished = True


class StandInLibrary(SimpleNamespace):
    """The module."""

    def __init__(self) -> None:
        super().__init__(errors=SimpleNamespace(Error=RuntimeError), Settings=lambda **settings: settings)
        self.runs: list[StandInRun] = []
        self.started: list[dict[str, Any]] = []
        self.problem = ""

    def init(
        self,
        project: str | None = None,
        dir: str | None = None,
        id: str | None = None,
        name: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str | None = None,
        settings: Any = None,
    ) -> StandInRun:
        if self.problem:
            raise RuntimeError(self.problem)
        self.started.append(
            {"project": project, "dir": dir, "id": id, "name": name, "config": config, "resume": resume}
        )
        self.runs.append(StandInRun())
        return self.runs[-1]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandInLibrary:
    library = StandInLibrary()
    monkeypatch.setitem(sys.modules, "wandb", library)  # pyright: ignore[reportArgumentType]
    return library


def record(iteration: int) -> MetricRecord:
    return MetricRecord(iteration, 1.0, {"loss": 2.0}, {"expert_load_max": {5: 1.5}}, alarms=("alarm: x",))


def test_iteration_is_the_axis_and_a_resume_goes_on_as_the_same_run(
    library: StandInLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(1000)
    monkeypatch.setattr(weights_and_biases, "time", SimpleNamespace(time=lambda: float(next(seconds))))
    for iterations in ((1, 2, 3), (2, 3, 4)):
        sink = WandbSink("p", "n", tmp_path, {"a": 1})
        for iteration in iterations:
            sink.write(record(iteration))
        sink.close()
    first, second = library.started
    assert first == second
    assert first["resume"] == "allow"
    assert first["id"] == json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert library.runs[0].axes == [("iteration", None), ("*", "iteration")]
    data, _ = library.runs[0].logged[0]
    assert data == {"iteration": 1, "training/loss": 2.0, "experts/expert_load_max/layer_5": 1.5}
    steps = [step for run in library.runs for _, step in run.logged]
    assert steps == sorted(set(steps)), "no process falls behind another"
    assert library.runs[0].alerts[0] == "iteration 1: alarm: x"
    assert library.runs[0].is_finished


def test_a_process_that_was_killed_leaves_word(library: StandInLibrary, tmp_path: Path) -> None:
    killed = WandbSink("p", "n", tmp_path, {})
    assert killed.unfinished_since_s is None
    since_s = json.loads((tmp_path / "wandb.json").read_text())["open_since"]
    assert WandbSink("p", "n", tmp_path, {}).unfinished_since_s == since_s
    again = WandbSink("p", "n", tmp_path, {})
    assert again.unfinished_since_s == since_s, "the oldest that nobody finished"
    again.close()
    assert WandbSink("p", "n", tmp_path, {}).unfinished_since_s is None


def test_a_damaged_identity_is_a_new_run(library: StandInLibrary, tmp_path: Path) -> None:
    (tmp_path / "wandb.json").write_text('{"id": 3}')
    WandbSink("p", "n", tmp_path, {})
    assert library.started[0]["id"] == json.loads((tmp_path / "wandb.json").read_text())["id"]


def test_what_wandb_refuses_is_one_line(library: StandInLibrary, tmp_path: Path) -> None:
    library.problem = "api_key not configured\n(no-tty)"
    with pytest.raises(ConfigError, match=r"--wandb-project.*not configured \(no-tty\).*WANDB_MODE=offline"):
        WandbSink("p", "n", tmp_path, {})


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"--wandb-project.*not installed.*megatron_glue\[wandb\]"):
        WandbSink("p", "n", tmp_path, {})


def test_the_stand_in_has_the_signatures_of_the_library() -> None:
    wandb = pytest.importorskip("wandb", reason="pip install '.[wandb]'")
    real_init = inspect.signature(wandb.init).parameters
    assert set(inspect.signature(StandInLibrary().init).parameters) <= set(real_init)
    for method in ("log", "define_metric", "alert", "finish"):
        real = inspect.signature(getattr(wandb.Run, method)).parameters
        own = [name for name in inspect.signature(getattr(StandInRun, method)).parameters if name != "self"]
        assert set(own) <= set(real), method
    assert issubclass(wandb.errors.Error, Exception)
