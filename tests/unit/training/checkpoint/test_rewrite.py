"""New checkpoints of old ones: other files bit for bit, averages, and what is refused."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.training.checkpoint import rewrite as checkpoint_rewrite
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.index import SavedTensor
from megatron_glue.training.checkpoint.inspect import OpenCheckpoint, find_checkpoints, verify
from megatron_glue.training.checkpoint.rewrite import average, newest_of, read_tensor, reshard, shards_of
from tests.support.toy_run import Run


def saved(root: Path, num_checkpoints: int, **options) -> list[OpenCheckpoint]:
    run = Run(root, **options)
    run.store._keep_last = 9
    for _ in range(num_checkpoints):
        run.train(1)
        run.save()
    return [verify(path) for path in find_checkpoints(root)]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("num_shards", [1, 3, 100])
def test_a_rewritten_checkpoint_holds_the_same_bits_and_can_be_loaded(tmp_path: Path, num_shards: int) -> None:
    (source,) = saved(tmp_path / "run", 1)
    told: list[tuple[int, int]] = []
    path = reshard(source, tmp_path / "new" / "folder", num_shards, lambda *progress: told.append(progress))
    copy = verify(path)
    assert copy.index.keys() == source.index.keys()
    for name in source.index:
        assert bits(read_tensor(copy, name)) == bits(read_tensor(source, name)), name
    files = {part.relative_path for saved in copy.index.values() for part in saved.slices}
    assert files == {f"__{number}_0.distcp" for number in range(min(num_shards, len(source.index)))}
    assert told[-1][0] == told[-1][1] == sum(saved.num_bytes for saved in source.index.values())
    assert copy.facts["origin"] == {"resharded_from": str(source.path), "files": len(files)}
    assert {**copy.facts, "origin": None} == {**source.facts, "origin": None}

    other = Run(tmp_path / "run", seed=5)
    loaded = other.store.load(path, other.state())
    assert loaded.step == 1
    again = Run(tmp_path / "run", seed=6)
    again.store.load(source.path, again.state())
    assert all(torch.equal(tensor, again.tensors()[name]) for name, tensor in other.tensors().items())


def test_files_are_about_as_large_as_each_other() -> None:
    index = {str(i): SavedTensor(torch.float32, (i,), ()) for i in range(1, 40)}
    shards = shards_of(index, 4)
    assert sorted(name for shard in shards for name in shard) == sorted(index)
    loads = [sum(index[name].num_bytes for name in shard) for shard in shards]
    assert max(loads) - min(loads) <= 4 * 4
    assert shards_of({"a": index["1"]}, 3) == [["a"]]


def test_there_are_no_more_files_than_tensors_however_many_are_asked_for() -> None:
    index = {str(i): SavedTensor(torch.float32, (i,), ()) for i in range(1, 2_000)}
    assert len(shards_of(index, 10**15)) == len(index)


def test_memory_is_that_of_a_tensor_and_not_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = saved(tmp_path / "run", 1)
    alive, most = 0, 0
    real = checkpoint_rewrite.read_tensor

    class Counted(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def read(checkpoint: OpenCheckpoint, name: str) -> torch.Tensor:
        nonlocal alive, most
        tensor = real(checkpoint, name).as_subclass(Counted)
        alive += 1
        most = max(most, alive)
        return tensor

    monkeypatch.setattr(checkpoint_rewrite, "read_tensor", read)
    monkeypatch.setattr(checkpoint_rewrite, "write_parts", _write_plain(checkpoint_rewrite.write_parts))
    reshard(source, tmp_path / "copy", 1)
    assert most <= 3


def _write_plain(real):
    """Writes the plain tensors, since a subclass cannot be read with weights_only."""

    def plain(parts):
        for entry in parts:
            yield replace(entry, part=replace(entry.part, tensor=entry.part.tensor.as_subclass(torch.Tensor)))

    return lambda path, parts: real(path, plain(parts))


def test_an_average_is_the_mean_and_everything_else_the_newest(tmp_path: Path) -> None:
    sources = saved(tmp_path / "run", 3)
    path = average([sources[2], sources[0], sources[1]], tmp_path / "mean", 2)
    mean = verify(path)
    for name in mean.index:
        values = [read_tensor(source, name) for source in sources]
        if name.startswith("model."):
            expected = torch.stack([value.double() for value in values]).sum(0).div(3).float()
            assert torch.equal(read_tensor(mean, name), expected), name
            assert not torch.equal(expected, values[-1]) or name == "model.balance"
        else:
            assert bits(read_tensor(mean, name)) == bits(values[-1]), name
    assert mean.step == 3
    assert mean.facts["counters"] == sources[2].facts["counters"]
    assert mean.facts["origin"]["all_but_weights_from"] == str(sources[2].path)
    run = Run(tmp_path / "other", seed=9)
    assert run.store.load(path, run.state()).step == 3
    weights_only = Run(tmp_path / "other", seed=9)
    weights_only.store.load(path, weights_only.state(weights_only=True))
    assert torch.equal(weights_only.model[0].weight, run.model[0].weight)


def test_of_equal_steps_the_last_is_the_newest(tmp_path: Path) -> None:
    sources = saved(tmp_path / "a", 2) + saved(tmp_path / "b", 2, seed=3)
    assert newest_of(sources) is sources[3]
    assert newest_of(sources[:3]) is sources[1]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    (one,) = saved(tmp_path / "a", 1)
    (other,) = saved(tmp_path / "b", 1, num_layers=3)
    with pytest.raises(CheckpointError, match=r"a/step_00000001: another model than .*b/step_00000001 \(num_layers\)"):
        average([one, other], tmp_path / "c")
    with pytest.raises(ConfigError, match="one checkpoint has no average"):
        average([one], tmp_path / "c")
    for write in (lambda: average([one, one], tmp_path / "a"), lambda: reshard(one, tmp_path / "a")):
        with pytest.raises(ConfigError, match=r"DESTINATION=.*a: exists already"):
            write()
    assert not (tmp_path / "c").exists()


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    (source,) = saved(tmp_path / "run", 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"copy\.incomplete/__0_0\.distcp: File too large") as caught:
            reshard(source, tmp_path / "copy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_others_keep_where_it_would_be_written_is_refused(tmp_path: Path, kind: str) -> None:
    (source,) = saved(tmp_path / "run", 1)
    mine, taken = tmp_path / "mine", tmp_path / "copy.incomplete"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    if kind == "link":
        taken.symlink_to(mine)
    else:
        (mine if kind == "folder" else mine / "notes.txt").rename(taken)
    with pytest.raises(
        ConfigError, match=r"DESTINATION=.*copy: it would be written to .*copy\.incomplete, which holds"
    ):
        reshard(source, tmp_path / "copy")
    kept = {"folder": taken / "notes.txt", "file": taken, "link": mine / "notes.txt"}[kind]
    assert kept.read_text() == "mine"


def test_what_a_killed_rewrite_left_is_no_obstacle(tmp_path: Path) -> None:
    (source,) = saved(tmp_path / "run", 1)
    reshard(source, tmp_path / "copy", 3)
    (tmp_path / "copy").rename(tmp_path / "copy.incomplete")
    reshard(source, tmp_path / "copy", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "run"]
    verify(tmp_path / "copy")
