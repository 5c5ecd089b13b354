"""Slices to disk and back in one process, and that nothing is ever unpickled."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_glue.training.checkpoint import tensors as checkpoint_tensors
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.index import SavedTensor, merge_tensors
from megatron_glue.training.checkpoint.parts import GlobalTensor, Part
from megatron_glue.training.checkpoint.tensors import (
    NamedPart,
    WrittenFile,
    read_parts,
    slice_file,
    write_dcp_metadata,
    write_parts,
)

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


def whole(name: str) -> NamedPart:
    return NamedPart(name, tuple(TENSORS[name].shape), GlobalTensor.whole(TENSORS[name]).parts[0])


def target(name: str) -> GlobalTensor:
    return GlobalTensor.whole(torch.zeros_like(TENSORS[name]))


def write(folder: Path) -> tuple[WrittenFile, dict[str, SavedTensor]]:
    return write_parts(folder / slice_file(0), map(whole, TENSORS))


def test_round_trip_is_bitwise(tmp_path: Path) -> None:
    _, index = write(tmp_path)
    assert {name: (saved.shape, saved.dtype) for name, saved in index.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()
    }
    loaded = {name: target(name) for name in TENSORS}
    read_parts(tmp_path, index, loaded)
    for name, tensor in TENSORS.items():
        assert bits(loaded[name].parts[0].tensor) == bits(tensor), name


def test_the_checksum_is_that_of_the_file_and_slices_fill_it(tmp_path: Path) -> None:
    written, index = write(tmp_path)
    data = (tmp_path / written.name).read_bytes()
    assert written == WrittenFile("__0_0.distcp", len(data), hashlib.sha256(data).hexdigest())
    places = sorted((part.offset, part.length) for saved in index.values() for part in saved.slices)
    assert [start for start, _ in places] == [0, *(start + length for start, length in places[:-1])]
    assert sum(places[-1]) == len(data)


def test_a_view_is_saved_without_what_it_is_a_view_of(tmp_path: Path) -> None:
    view = torch.zeros(1_000_000)[:2]
    written, _ = write_parts(tmp_path / "x", [NamedPart("a", (2,), Part((0,), view))])
    assert written.num_bytes < 4000


def test_any_boxes_are_read_from_any_others(tmp_path: Path) -> None:
    whole_tensor = torch.arange(60).view(3, 4, 5)
    indexes = []
    for rank, (first, second) in enumerate([((0, 0, 0), (3, 4, 2)), ((0, 0, 2), (3, 1, 3)), ((0, 1, 2), (3, 3, 3))]):
        box = whole_tensor[tuple(slice(begin, begin + size) for begin, size in zip(first, second, strict=True))]
        indexes.append(write_parts(tmp_path / slice_file(rank), [NamedPart("a", (3, 4, 5), Part(first, box))])[1])
    index = merge_tensors(indexes, tmp_path)
    rows = [Part((0, 0, 0), torch.zeros(1, 4, 5, dtype=torch.int64)), Part((2, 3, 0), torch.zeros(1, 1, 5).long())]
    read_parts(tmp_path, index, {"a": GlobalTensor((3, 4, 5), torch.int64, tuple(rows))})
    assert torch.equal(rows[0].tensor, whole_tensor[:1])
    assert torch.equal(rows[1].tensor, whole_tensor[2:, 3:])


def test_parts_are_taken_one_at_a_time(tmp_path: Path) -> None:
    """A reshard of a checkpoint larger than memory depends on it; DCP's own writer keeps them all."""
    made: list[weakref.ref] = []

    def make() -> Iterator[NamedPart]:
        for index in range(4):
            assert sum(tensor() is not None for tensor in made) <= 1, "the one before lives until it is replaced"
            tensor = torch.zeros(8)
            made.append(weakref.ref(tensor))
            yield NamedPart(str(index), (8,), Part((0,), tensor))
            del tensor

    write_parts(tmp_path / "x", make())
    assert len(made) == 4


class Hostile:
    def __reduce__(self) -> tuple:
        return os.mkdir, (os.environ["HOSTILE_FOLDER"],)


def test_dcp_metadata_is_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sign = tmp_path / "executed"
    monkeypatch.setenv("HOSTILE_FOLDER", str(sign))
    _, index = write(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Hostile()))
    loaded = target("model.int64")
    read_parts(tmp_path, index, {"model.int64": loaded})
    assert torch.equal(loaded.parts[0].tensor, TENSORS["model.int64"])
    assert not sign.exists()


def test_a_hostile_slice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sign = tmp_path / "executed"
    monkeypatch.setenv("HOSTILE_FOLDER", str(sign))
    _, index = write(tmp_path)
    torch.save(Hostile(), tmp_path / "hostile")
    saved = index["model.int64"]
    length = (tmp_path / "hostile").stat().st_size
    index["model.int64"] = replace(
        saved, slices=(replace(saved.slices[0], relative_path="hostile", offset=0, length=length),)
    )
    with pytest.raises(CheckpointError) as caught:
        read_parts(tmp_path, index, {"model.int64": target("model.int64")})
    assert "\n" not in str(caught.value)
    assert not sign.exists()


def test_other_dcp_tools_read_what_we_wrote(tmp_path: Path) -> None:
    _, index = write(tmp_path)
    write_dcp_metadata(tmp_path, index)
    loaded = {"model.int64": torch.zeros(2, dtype=torch.int64)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        load(loaded, checkpoint_id=str(tmp_path), no_dist=True)
    assert torch.equal(loaded["model.int64"], TENSORS["model.int64"])
    dcp_to_torch_save(tmp_path, tmp_path / "all.pt")
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    assert {name: bits(tensor) for name, tensor in everything.items()} == {n: bits(t) for n, t in TENSORS.items()}


def test_a_full_disk_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    class Full:
        def __init__(self, stream) -> None:
            self.stream, self.left = stream, 1500

        def write(self, data) -> int:
            self.left -= len(data)
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.stream.write(data)

        def __enter__(self):
            return self

        def __exit__(self, *error: object) -> None:
            self.stream.close()

    monkeypatch.setattr(Path, "open", lambda path, mode: Full(real(path, mode)))
    with pytest.raises(OSError, match=r"No space left on device: .*__0_0\.distcp") as caught:
        write(tmp_path)
    assert caught.value.errno == errno.ENOSPC


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    _, index = write(tmp_path)
    (tmp_path / slice_file(0)).unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: No such file"):
        read_parts(tmp_path, index, {"model.int64": target("model.int64")})


def test_an_interrupt_inside_torch_s_writer_stays_one() -> None:
    class Interrupted:
        def write(self, _data: object) -> int:
            raise KeyboardInterrupt

    part = NamedPart("a", (3,), GlobalTensor.whole(torch.zeros(3)).parts[0])
    with pytest.raises(KeyboardInterrupt):
        checkpoint_tensors._write_parts(checkpoint_tensors._HashedStream(Interrupted()), "file", [part])
