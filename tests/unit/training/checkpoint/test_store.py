"""Save and load of a whole run in one process: bitwise, verified, refused where it must be."""

from __future__ import annotations

import errno
import json
import resource
from pathlib import Path

import pytest
import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.yaml_files import read_yaml
from megatron_glue.parallel.precision import local
from megatron_glue.training.checkpoint import files as checkpoint_files
from megatron_glue.training.checkpoint import state as checkpoint_state
from megatron_glue.training.checkpoint import tensors as checkpoint_tensors
from megatron_glue.training.checkpoint.store import CheckpointError
from tests.support.toy_run import Run


def assert_same(first: Run, second: Run) -> None:
    ours, theirs = first.tensors(), second.tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("before", ["fused", "foreach"])
@pytest.mark.parametrize("after", ["fused", "foreach"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, before: str, after: str) -> None:
    run = Run(tmp_path, backend=before)
    run.train(3)
    run.train(1, norm=float("nan"))
    path = run.save()
    resumed = Run(tmp_path, seed=99, backend=after)
    assert resumed.store.find_latest() == path
    loaded = resumed.store.load(path, resumed.state())
    assert (loaded.step, loaded.counters, loaded.data_position) == (4, {"iteration": 4}, {"epoch": 1, "pack": 4})
    assert loaded.config["model"]["num_layers"] == 2
    assert resumed.optimizer.num_skipped_updates == 1
    assert_same(run, resumed)
    if before == after:
        generator = torch.get_rng_state()
        run.train(2)
        torch.set_rng_state(generator)
        resumed.train(2)
        assert_same(run, resumed)


def test_f94_resuming_twice_equals_not_stopping(tmp_path: Path) -> None:
    straight = Run(tmp_path / "straight")
    straight.train(6)
    for segment in range(3):
        run = Run(tmp_path / "resumed", seed=0 if segment == 0 else 7)
        if (latest := run.store.find_latest()) is not None:
            run.iteration = run.store.load(latest, run.state()).counters["iteration"]
        run.train(2)
        run.save()
    assert run.iteration == 6
    assert_same(straight, run)


def test_compute_copies_are_refreshed_by_a_load(tmp_path: Path) -> None:
    run = Run(tmp_path)
    path = run.save()
    other = Run(tmp_path, seed=5)
    weight = other.model[0].weight
    stale = local(weight, torch.bfloat16).detach().clone()
    other.store.load(path, other.state())
    assert not torch.equal(local(weight, torch.bfloat16), stale)
    assert torch.equal(local(weight, torch.bfloat16), run.model[0].weight.detach().bfloat16())


def test_weights_alone(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1)
    path = run.save()
    other = Run(tmp_path, seed=5)
    moments = {name: tensor for name, tensor in other.tensors().items() if "/" in name}
    generator = torch.get_rng_state()
    other.store.load(path, other.state(weights_only=True))
    assert torch.equal(other.model[0].weight, run.model[0].weight)
    assert all(torch.equal(other.tensors()[name], tensor) for name, tensor in moments.items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_what_lies_in_the_folder(tmp_path: Path) -> None:
    run = Run(tmp_path)
    path = run.save()
    names = {entry.name for entry in path.iterdir()}
    assert names == {"__0_0.distcp", ".metadata", "config.yaml", "index.json", "manifest.json", "meta.json"}
    listed = json.loads((path / "manifest.json").read_bytes())["files"]
    assert listed.keys() == names - {"manifest.json"}
    assert read_yaml(str(path / "config.yaml"))


def test_old_checkpoints_go_and_a_saved_step_is_not_written_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(3):
        run.train(1)
        path = run.save()
    stamp = (path / "meta.json").stat().st_mtime_ns
    assert not run.store.save(run.iteration, run.state())
    resumed = Run(tmp_path, seed=9)
    resumed.iteration = resumed.store.load(path, resumed.state()).step
    assert not resumed.store.save(resumed.iteration, resumed.state())
    assert (path / "meta.json").stat().st_mtime_ns == stamp
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_00000002", "step_00000003"]


def test_step_zero_can_be_saved_twice(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.save() == run.save() == run.store.find_latest() == tmp_path / "step_00000000"


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "config.yaml", "index.json", "meta.json"])
def test_a_flipped_bit_is_found_before_anything_is_read(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path)
    run.train(1)
    path = run.save()
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)
    other = Run(tmp_path, seed=5)
    before = other.tensors()
    with pytest.raises(CheckpointError, match=f"{name}: damaged") as caught:
        other.store.load(path, other.state())
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.tensors().items())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = Run(tmp_path).save()
    other = Run(tmp_path, num_layers=3)
    with pytest.raises(
        ConfigError, match=r"--num-layers=3: .*step_00000000/meta.json holds a model with --num-layers 2; set"
    ):
        other.store.load(path, other.state())
    renamed = Run(tmp_path)
    renamed.model.register_buffer("extra", torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors: model\.extra"):
        renamed.store.load(path, renamed.state())


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = Run(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"--save=.*file: cannot be written: a file is in the way"):
        run.store.prepare()
    Run(tmp_path / "new").store.prepare()
    assert (tmp_path / "new").is_dir()


FAILING = {
    "write_parts": checkpoint_tensors,
    "write_dcp_metadata": checkpoint_tensors,
    "write_durably": checkpoint_files,
    "publish": checkpoint_files,
    "start_folder": checkpoint_files,
}


@pytest.mark.parametrize("station", FAILING)
def test_a_full_disk_leaves_earlier_checkpoints(tmp_path: Path, station: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.train(1)
    path = run.save()
    saved = run.tensors()

    def full(*_args, **_kwargs) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "somewhere"))

    run.train(1)
    with monkeypatch.context() as patch:
        patch.setattr(FAILING[station], station, full)
        with pytest.raises(
            CheckpointError, match=r"step 2 was not saved.*somewhere: No space left on device"
        ) as caught:
            run.save()
    assert "\n" not in str(caught.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_00000001"]
    other = Run(tmp_path, seed=5)
    assert other.store.find_latest() == path
    other.store.load(path, other.state())
    assert all(torch.equal(tensor, saved[name]) for name, tensor in other.tensors().items())
    assert run.save() == tmp_path / "step_00000002"


@pytest.mark.parametrize("station", ["collect_tensors", "collect_facts"])
def test_an_unexpected_error_is_told_like_any_other(
    tmp_path: Path, station: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)

    def fail(*_args) -> None:
        raise AssertionError("two tensors\nare called a")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_state, station, fail)
        with pytest.raises(
            CheckpointError, match=r"step 0 was not saved.*AssertionError: two tensors are called a"
        ) as caught:
            run.save()
    assert isinstance(caught.value.__cause__.__cause__, AssertionError)
    assert list(tmp_path.iterdir()) == []
    run.store.load(run.save(), run.state())


def test_a_file_size_limit_stands_for_a_full_disk(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    run.train(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="step 1 was not saved") as caught:
            run.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_00000000"]
