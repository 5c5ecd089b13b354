"""Checkpoints looked at without a model: found, verified, described."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.training.checkpoint import files
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.inspect import describe_checkpoint, find_checkpoints, open_checkpoint, verify
from tests.support.toy_run import Run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run = Run(tmp_path)
    run.store._keep_last = 9
    for _ in range(3):
        run.train(1)
        run.save()
    return tmp_path


def test_a_run_stands_for_its_checkpoints_and_a_step_for_itself(root: Path) -> None:
    steps = [root / f"step_0000000{step}" for step in (1, 2, 3)]
    assert find_checkpoints(root) == steps
    assert find_checkpoints(root, last=2) == steps[1:]
    assert find_checkpoints(steps[0], last=2) == steps[:1]
    (root / "latest").write_text("step_00000002\n")
    assert find_checkpoints(root) == steps[:2]
    with pytest.raises(ConfigError, match=r"DIR=.*missing: is no folder"):
        find_checkpoints(root / "missing")
    (root / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        find_checkpoints(root / "empty")


def test_verify_reads_every_byte_and_tells_how_far_it_is(root: Path) -> None:
    told: list[tuple[int, int]] = []
    checkpoint = verify(root / "step_00000002", lambda done, total: told.append((done, total)))
    assert checkpoint.step == 2
    listed = files.listed_sizes(checkpoint.path)
    assert told[-1] == (sum(listed.values()), sum(listed.values()))
    assert len(told) == len(listed)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "config.yaml", "index.json", "meta.json"])
def test_verify_names_the_damaged_file(root: Path, name: str) -> None:
    path = root / "step_00000003" / name
    data = path.read_bytes()
    for damaged in (data[:-1], bytes([data[0] ^ 1]) + data[1:]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"step_00000003/{name}: damaged"):
            verify(root / "step_00000003")
    path.unlink()
    with pytest.raises(CheckpointError, match=f"step_00000003/{name}: No such file"):
        verify(root / "step_00000003")


def test_an_index_with_a_hole_is_found_though_its_checksum_is_right(root: Path) -> None:
    folder = root / "step_00000003"
    index = json.loads((folder / "index.json").read_bytes())
    index["tensors"]["model.0.weight"]["slices"][0]["sizes"][0] -= 1
    files.write_durably(folder / "index.json", files.to_json(index))
    entries = files.read_manifest(folder) | files.describe_files([folder / "index.json"])
    files.write_manifest(folder, entries)
    with pytest.raises(CheckpointError, match=r"index\.json: model\.0\.weight\[3:4, 0:4\] of shape \(4, 4\) is in no"):
        verify(folder)


def test_description(root: Path) -> None:
    told = describe_checkpoint(open_checkpoint(root / "step_00000003"))
    assert json.loads(json.dumps(told)) == told
    assert (told["step"], told["data_position"]) == (3, {"epoch": 1, "pack": 3})
    assert told["model"]["num_layers"] == 2
    assert told["kinds"]["model"] == {"tensors": 5, "elements": 43, "bytes": 172}
    assert told["kinds"].keys() == {"model", "optimizer", "rng"}
    assert told["tensors"]["model.0.weight"] == {"shape": [4, 4], "dtype": "float32", "bytes": 64, "slices": 1}
    assert told["bytes"] == sum(told["files"].values())
    assert told["config"]["model"]["num_layers"] == 2
