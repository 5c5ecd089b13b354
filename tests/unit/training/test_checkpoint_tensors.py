"""Tensors to disk and back in one process, and that nothing is ever unpickled."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from megatron_glue.training.checkpoint_files import CheckpointError
from megatron_glue.training.checkpoint_tensors import INDEX_NAME, read_index, read_tensors, write_tensors

# Every dtype that a run may hold, with bit patterns that a careless conversion would change.
TENSORS = {
    "model.fp32": torch.tensor([[1.5, -0.0, float("inf")], [float("nan"), 1e-45, 3.0]]),
    "model.bf16": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
    "model.int64": torch.tensor([2**62, -1]),
    "model.empty": torch.zeros(0, 4),
    "model.column": torch.arange(6.0).view(2, 3).T,
    "optimizer.step": torch.tensor(7.0),
    "rng": torch.arange(5, dtype=torch.uint8),
}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tensors(tmp_path, dict(TENSORS), None)
    return tmp_path


def test_round_trip_is_bitwise(folder: Path) -> None:
    loaded = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    read_tensors(folder, dict(loaded), None)
    for name, tensor in TENSORS.items():
        assert bits(loaded[name]) == bits(tensor), name


def test_index_tells_names_shapes_and_dtypes(folder: Path) -> None:
    index = read_index(folder)
    assert {name: (saved.shape, saved.dtype) for name, saved in index.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()
    }


def test_some_tensors_can_be_read_alone(folder: Path) -> None:
    target = torch.zeros(2, dtype=torch.int64)
    read_tensors(folder, {"model.int64": target}, None)
    assert torch.equal(target, TENSORS["model.int64"])


class Hostile:
    def __reduce__(self) -> tuple:
        return os.mkdir, (os.environ["HOSTILE_FOLDER"],)


def test_dcp_metadata_is_never_unpickled(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sign = tmp_path / "executed"
    monkeypatch.setenv("HOSTILE_FOLDER", str(sign))
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile()))
    target = torch.zeros(2, dtype=torch.int64)
    read_tensors(folder, {"model.int64": target}, None)
    assert torch.equal(target, TENSORS["model.int64"])
    assert not sign.exists()


def test_a_hostile_slice_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sign = tmp_path / "executed"
    monkeypatch.setenv("HOSTILE_FOLDER", str(sign))
    torch.save(Hostile(), folder / "hostile")
    index = json.loads((folder / INDEX_NAME).read_bytes())
    part = index["tensors"]["model.int64"]["slices"][0]
    part |= {"file": "hostile", "start": 0, "bytes": (folder / "hostile").stat().st_size}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        read_tensors(folder, {"model.int64": torch.zeros(2, dtype=torch.int64)}, None)
    assert "\n" not in str(caught.value)
    assert not sign.exists()


def test_dcp_reads_what_we_wrote(folder: Path) -> None:
    from torch.distributed.checkpoint import load

    target = {"model.int64": torch.zeros(2, dtype=torch.int64)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        load(target, checkpoint_id=str(folder), no_dist=True)
    assert torch.equal(target["model.int64"], TENSORS["model.int64"])


def test_a_damaged_index_is_one_line(folder: Path) -> None:
    path = folder / INDEX_NAME
    good = json.loads(path.read_bytes())

    def refused(reason: str) -> None:
        with pytest.raises(CheckpointError, match=reason) as caught:
            read_index(folder)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    for damaged in ("[]", '{"tensors": 1}', '{"tensors": {"a": {}}}'):
        path.write_text(damaged)
        refused("damaged")
    for dtype in ("no_such", "load"):
        path.write_text(json.dumps({"tensors": {"a": {"dtype": dtype, "shape": [], "slices": []}}}))
        refused("damaged")
    good["tensors"]["model.fp32"]["slices"] = []
    path.write_text(json.dumps(good))
    refused(r"model\.fp32 has 0 elements of shape \(2, 3\)")


def test_a_failing_write_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        write_tensors(Path("/proc/checkpoint"), dict(TENSORS), None)
    assert "\n" not in str(caught.value)
    assert "/proc/checkpoint" in str(caught.value)
