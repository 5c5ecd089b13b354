"""Trials of kills: rounds can be drawn again, a folder belongs to one trial, and what a kill leaves is looked at."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.proofs.kill_trial import MOMENTS, KillTrial, Plan, Round, TrialSettings
from megatron_glue.proofs.layouts import Layout
from megatron_glue.training.checkpoint import files

TWO = Layout("two", 2)


def trial_in(folder: Path, **settings: Any) -> KillTrial:
    return KillTrial(folder, ("--a", "1"), (TWO,), TrialSettings(**{"num_kills": 3} | settings))


def publish(root: Path, step: int) -> Path:
    """A checkpoint with one file."""
    folder = files.start_folder(root, step)
    files.write_durably(folder / "data", b"x" * step)
    files.write_manifest(folder, files.describe_files([folder / "data"]))
    return files.publish(folder)


def test_rounds_depend_on_seed_and_number_only() -> None:
    plans = [Plan.draw(number, 0, TWO) for number in range(200)]
    assert plans == [Plan.draw(number, 0, TWO) for number in range(200)]
    assert plans != [Plan.draw(number, 1, TWO) for number in range(200)]
    assert {plan.moment for plan in plans} == set(MOMENTS)
    assert {plan.victim for plan in plans} == {"launcher", "0", "1"}
    assert [plan.saves for plan in plans[:4]] == ["sync", "async", "sync", "async"]
    assert sum(plan.moment == "saving" for plan in plans) > 50, "kills are biased to saves"


def test_a_trial_goes_on_after_the_rounds_that_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def run_round(self: KillTrial, number: int, published_before: int) -> Round:
        asked.append((number, published_before))
        return Round(Plan.draw(number, 0, TWO), published=10 * number)

    monkeypatch.setattr(KillTrial, "_run_round", run_round)
    first = trial_in(tmp_path).rounds()
    next(first)
    next(first)
    assert [r.plan.number for r in trial_in(tmp_path).rounds()] == [2]
    assert asked == [(0, -1), (1, 0), (2, 10)]
    assert trial_in(tmp_path).noted()[1] == Round(Plan.draw(1, 0, TWO), published=10)


def test_a_folder_belongs_to_one_trial(tmp_path: Path) -> None:
    trial_in(tmp_path)
    trial_in(tmp_path)
    with pytest.raises(ConfigError, match="--folder"):
        trial_in(tmp_path, seed=1)


def inspect(folder: Path, log: str, published_before: int, start_ns: int = 0) -> Round:
    result = Round(Plan.draw(0, 0, TWO))
    job: Any = SimpleNamespace(log=lambda: log)
    trial_in(folder)._inspect(result, job, published_before, start_ns)
    return result


RESUMED = "resuming from run/step_00000004 at iteration 4\niteration   5/100 | loss 1\n"


def test_a_sound_folder_passes(tmp_path: Path) -> None:
    for step in (4, 8):
        publish(tmp_path / "run", step)
    (tmp_path / "run/step_00000012.incomplete").mkdir()
    result = inspect(tmp_path, RESUMED, 4)
    assert (result.failures, result.published, result.resumed_from, result.unfinished) == ([], 8, 4, True)
    assert not inspect(tmp_path, RESUMED, 4, time.time_ns()).unfinished, "an earlier round left it"


def test_a_run_that_was_killed_before_its_first_step_passes(tmp_path: Path) -> None:
    assert inspect(tmp_path, "", -1).failures == []
    publish(tmp_path / "run", 4)
    assert inspect(tmp_path, "", 4).failures == []


def test_what_a_kill_must_not_leave_is_found(tmp_path: Path) -> None:
    root = tmp_path / "run"
    older = publish(root, 4)
    assert "started from step 4, step 8 was there" in inspect(tmp_path, RESUMED, 8).failures
    assert "step 4 is newest, step 8 was published before" in inspect(tmp_path, RESUMED, 8).failures
    assert inspect(tmp_path, "iteration   1/100 | loss 1\n", 4).failures == ["started from step None, step 4 was there"]
    publish(root, 8)
    (older / "data").write_bytes(b"yyyy")
    (failure,) = inspect(tmp_path, RESUMED, 4).failures
    assert "damaged" in failure


def test_a_published_checkpoint_that_would_not_be_resumed_from_is_found(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step in (4, 8):
        publish(root, step)
    (root / "latest").write_text("step_00000004\n")
    result = inspect(tmp_path, RESUMED, 4)
    assert result.failures == ["step 8 is published, the next start would resume from step 4"]
    assert result.published == 8


def course(folder: Path, monkeypatch: pytest.MonkeyPatch, killed: list[float], whole: list[float], **more: Any) -> Any:
    def run_to_end(self: KillTrial, name: str, layout: Layout, saves: str, *more: str) -> dict[str, Any]:
        losses = killed if name == "run" else whole
        return {"losses": losses, "grad_norms": [1.0] * len(losses)}

    monkeypatch.setattr(KillTrial, "_run_to_end", run_to_end)
    trial = KillTrial(folder, (), more.get("layouts", (TWO,)), TrialSettings(3))
    return trial.finish()


def test_the_course_must_be_that_of_a_run_which_nobody_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures, figures = course(tmp_path, monkeypatch, [3.0, 2.0], [3.0, 2.0])
    assert (failures, figures["steps"]) == ([], 2)
    json.dumps(figures)
    failures, _ = course(tmp_path, monkeypatch, [3.0, 2.0 + 1e-12], [3.0, 2.0])
    assert "losses differ at 1 steps, first at step 1" in failures[0]
    failures, _ = course(tmp_path, monkeypatch, [3.0], [3.0, 2.0])
    assert "1 losses instead of 2" in failures[0]
    failures, _ = course(tmp_path, monkeypatch, [3.0, float("nan")], [3.0, 2.0])
    assert failures


def test_layouts_that_take_turns_may_differ_a_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = {"layouts": (TWO, Layout("one", 1))}
    assert course(tmp_path, monkeypatch, [3.0, 2.0 + 1e-4], [3.0, 2.0], **layouts)[0] == []
    assert course(tmp_path, monkeypatch, [3.0, 2.0 + 1e-2], [3.0, 2.0], **layouts)[0]


def test_a_long_course_has_a_longer_limit() -> None:
    """1,640 steps did not fit into 900 s beside other work."""
    assert TrialSettings(num_kills=200).longest_run_s == 2 * TrialSettings(num_kills=200).num_steps
    assert TrialSettings(num_kills=5).longest_run_s == 900
    assert TrialSettings(num_kills=200, run_timeout_s=7.0).longest_run_s == 7.0
