"""What is not all there is not published: the audit between the last byte and the rename."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_glue.config.sections import MoEConfig
from megatron_glue.training.checkpoint import tensors as checkpoint_tensors
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.parts import Part
from megatron_glue.training.checkpoint.write import Snapshot
from tests.support.toy_run import Run


def refused(run: Run, snapshot: Snapshot) -> str:
    with pytest.raises(CheckpointError) as caught:
        run.store.write(snapshot, run.store.ranks)
    assert str(caught.value).startswith(f"step {snapshot.step} was not saved, earlier checkpoints are untouched: ")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in run.store.root.iterdir()) == ["latest", "step_00000000"]
    return str(caught.value)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.save()
    run.train(1)
    return run


def test_a_whole_snapshot_is_published(run: Run) -> None:
    run.store.write(run.store.snapshot(1, run.state()), run.store.ranks)
    assert run.store.find_latest() == run.store.path_of(1)


def test_a_part_that_nobody_wrote(run: Run) -> None:
    snapshot = run.store.snapshot(1, run.state())
    cut = [
        replace(entry, part=Part((0, 0), entry.part.tensor[:3])) if entry.name == "model.1.weight" else entry
        for entry in snapshot.parts
    ]
    line = refused(run, replace(snapshot, parts=cut))
    assert "step_00000001.incomplete: model.1.weight[3:4, 0:4] of shape (4, 4) is in no slice" in line


def test_a_part_that_was_written_twice(run: Run) -> None:
    snapshot = run.store.snapshot(1, run.state())
    line = refused(run, replace(snapshot, parts=[*snapshot.parts, snapshot.parts[0]]))
    assert "is in 2 slices (__0_0.distcp, __0_0.distcp)" in line


def test_a_file_that_is_shorter_than_what_was_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint_tensors.write_parts

    def lose_a_byte(path: Path, parts: object) -> object:
        result = real(path, parts)
        os.truncate(path, path.stat().st_size - 1)
        return result

    monkeypatch.setattr(checkpoint_tensors, "write_parts", lose_a_byte)
    assert "__0_0.distcp: " in refused(run, run.store.snapshot(1, run.state()))


def test_f103_experts_that_the_configuration_has_and_the_tensors_have_not(run: Run) -> None:
    run.config = run.config.model_copy(update={"moe": MoEConfig(num_experts=4)})
    assert "no experts of layer 0, 1" in refused(run, run.store.snapshot(1, run.state()))


def test_old_checkpoints_that_cannot_be_removed_are_no_failure(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stuck(*_args: object) -> None:
        raise PermissionError(13, "Permission denied", "run/step_00000000")

    monkeypatch.setattr("megatron_glue.training.checkpoint.files.prune", stuck)
    assert run.store.save(1, run.state())
    assert "run/step_00000000: old checkpoints cannot be removed: Permission denied" in caplog.text


def test_facts_are_those_of_the_moment(run: Run) -> None:
    counters: dict[str, object] = {"losses": [1.0]}
    state = replace(run.state(), counters=counters)
    snapshot = run.store.snapshot(1, state)
    counters["losses"] = [1.0, 2.0]
    run.store.write(snapshot, run.store.ranks)
    assert run.store.load(run.store.path_of(1), run.state()).counters == {"losses": [1.0]}
