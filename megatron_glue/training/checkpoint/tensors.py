"""Tensors of a checkpoint on the disk, in the format of ``torch.distributed.checkpoint`` (DCP).

A ``*.distcp`` file is one ``torch.save`` blob per slice, one after the other; DCP's own tools can read the result. Each
rank writes its slices alone, without DCP's planner: that one sends pickled plans around at every save, its writer keeps
all of a rank's tensors in memory until the file ends, and drops what its threads raise. Reading goes through DCP's
reader and its resharding, but with ``index.json`` instead of the pickled ``.metadata``, and with ``weights_only=True``:
nothing is ever unpickled.

Nothing here communicates.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.index import SavedSlice, SavedTensor
from megatron_glue.training.checkpoint.parts import GlobalTensor, Part

SLICES_SUFFIX = ".distcp"
DCP_METADATA_NAME = ".metadata"


@dataclass(frozen=True)
class WrittenFile:
    """A file of slices.

    Attributes:
        name: Its name in the checkpoint's folder.
        num_bytes: Its size.
        sha256: Checksum of what was written to it.
    """

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, eq=False)
class NamedPart:
    """A part that is to be written.

    Attributes:
        name: Global name of its tensor.
        shape: Shape of the whole tensor.
        part: The part.
    """

    name: str
    shape: tuple[int, ...]
    part: Part


def slice_file(rank: int) -> str:
    """Name of the file that a rank writes, as DCP would call it."""
    return f"__{rank}_0{SLICES_SUFFIX}"


def write_parts(path: Path, parts: Iterable[NamedPart]) -> tuple[WrittenFile, dict[str, SavedTensor]]:
    """Write a file of slices. It is durable on return.

    Parts are taken one at a time, so an iterator that makes them needs memory for one.

    Args:
        path: The file.
        parts: What to write, on any device.

    Returns:
        The file, and what stands where in it.

    Raises:
        OSError: If the disk is full or the like; torch alone would report an inconsistent file.
    """
    try:
        with path.open("wb") as raw:
            stream = _HashedStream(raw)
            index = _write_parts(stream, path.name, parts)
            raw.flush()
            os.fsync(raw.fileno())
    except OSError as error:
        # What write and fsync raise does not name the file, and so not the rank.
        raise OSError(error.errno, error.strerror, str(path)) from error
    return WrittenFile(path.name, stream.num_bytes, stream.digest.hexdigest()), index


def _write_parts(stream: _HashedStream, file_name: str, parts: Iterable[NamedPart]) -> dict[str, SavedTensor]:
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    slices: dict[str, list[SavedSlice]] = {}
    for entry in parts:
        tensor = entry.part.tensor.detach().cpu()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            # A view would be saved with all of the memory that it is a view of.
            tensor = tensor.clone()
        start = stream.num_bytes
        try:
            torch.save(tensor, stream)  # pyright: ignore[reportArgumentType]
        except RuntimeError as error:
            raise stream.failure or error from error
        place = SavedSlice(entry.part.offsets, entry.part.sizes, file_name, start, stream.num_bytes - start)
        kinds[entry.name] = (tensor.dtype, entry.shape)
        slices.setdefault(entry.name, []).append(place)
    return {name: SavedTensor(*kind, tuple(slices[name])) for name, kind in kinds.items()}


class _HashedStream:
    """A file that counts and hashes what is written to it, and remembers why writing failed."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.digest = hashlib.sha256()
        self.num_bytes = 0
        self.failure: BaseException | None = None

    def write(self, data: Any) -> int:
        try:
            self._raw.write(data)
        except BaseException as error:
            # Also Ctrl-C: torch, which stands in between, reports a file that is inconsistent.
            self.failure = self.failure or error
            raise
        self.digest.update(data)
        self.num_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        pass


def write_dcp_metadata(folder: Path, index: Mapping[str, SavedTensor]) -> None:
    """Write the ``.metadata`` that DCP's tools want. It is durable on return, and never read here."""
    results = []
    for name, saved in index.items():
        for part in saved.slices:
            info = _StorageInfo(part.relative_path, part.offset, part.length)
            results.append(WriteResult(MetadataIndex(name, part.offsets), part.length, info))
    FileSystemWriter(folder).finish(_metadata(index), [results])


def read_parts(folder: Path, index: Mapping[str, SavedTensor], wanted: Mapping[str, GlobalTensor]) -> None:
    """Read into tensors in place, whatever slices they were written in.

    Args:
        folder: A published checkpoint whose index was checked: its slices cover every tensor.
        index: Its index.
        wanted: Where to read into, by name. Shapes and dtypes are those of the index.

    Raises:
        CheckpointError: If a file cannot be read.
    """
    reader = FileSystemReader(folder)
    # Only files that are needed are opened, and of those only the slices.
    index = {name: index[name] for name in wanted}
    metadata = _metadata(index)
    metadata.storage_data = {
        MetadataIndex(name, part.offsets): part for name, saved in index.items() for part in saved.slices
    }
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    targets: dict[MetadataIndex, Tensor] = {}
    items: list[ReadItem] = []
    for name, tensor in wanted.items():
        stored = metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        chunks = [_chunk(part.offsets, part.sizes) for part in tensor.parts]
        items += create_read_items_for_chunk_list(name, stored, chunks)
        targets |= {MetadataIndex(name, part.offsets): part.tensor.detach() for part in tensor.parts}
    try:
        reader.read_data(LoadPlan(items), _PartPlanner(targets)).wait()
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: {error.strerror or error}") from error
    except Exception as error:
        # What torch raises about blobs has many kinds, among them those of hostile ones.
        line = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: cannot be read, {type(error).__name__}: {line[:300]}") from error


def _metadata(index: Mapping[str, SavedTensor]) -> Metadata:
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=saved.dtype),
                torch.Size(saved.shape),
                [_chunk(part.offsets, part.sizes) for part in saved.slices],
            )
            for name, saved in index.items()
        }
    )


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


class _PartPlanner(DefaultLoadPlanner):
    """Tells DCP's reader where the elements go that it has read."""

    def __init__(self, targets: Mapping[MetadataIndex, Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._targets = targets

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._targets[index]
