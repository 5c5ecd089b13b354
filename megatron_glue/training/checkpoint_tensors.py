"""Tensors of a checkpoint through ``torch.distributed.checkpoint`` (DCP), with an index that is JSON.

DCP writes each rank's slices and a ``.metadata`` file that is a pickle. Here the same facts also go into
``index.json``, and reading uses only that, so nothing is ever unpickled: slices are read with ``weights_only=True``,
and there are no other objects. The ``.metadata`` file stays for other people's DCP tools.

Every rank must call these functions with the same names, except for tensors that only one rank has.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_glue.training.checkpoint_files import CheckpointError, read_json, to_json, write_durably

INDEX_NAME = "index.json"


@dataclass(frozen=True)
class SavedSlice:
    """Where one slice of a tensor is. DCP's reader asks for these attribute names.

    Attributes:
        offsets: First element of the slice, per dim.
        sizes: Elements of the slice, per dim.
        relative_path: File in the checkpoint's folder.
        offset: First byte in the file.
        length: Number of bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


@dataclass(frozen=True)
class SavedTensor:
    """One whole tensor of a checkpoint.

    Attributes:
        dtype: Its dtype.
        shape: Its global shape.
        slices: Its parts, as the ranks wrote them.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: tuple[SavedSlice, ...]


def write_tensors(folder: Path, tensors: dict[str, Tensor], group: ProcessGroup | None) -> None:
    """Write every rank's slices, each replicated tensor once, and the index. Files are durable on return.

    Args:
        folder: An existing folder, the same for all ranks.
        tensors: Plain tensors (equal on all ranks that have the name) and DTensors.
        group: All ranks; ``None`` for one process.

    Raises:
        CheckpointError: On all ranks, if it fails on one.
    """
    with _one_line_errors(folder):
        save(
            tensors,
            storage_writer=_IndexedWriter(folder),
            # Flat names are kept as they are; replicated tensors are spread over the ranks.
            planner=DefaultSavePlanner(flatten_state_dict=False),
            process_group=group,
            no_dist=group is None,
        )


def read_tensors(folder: Path, tensors: dict[str, Tensor], group: ProcessGroup | None) -> None:
    """Read tensors in place; each rank reads the slices it needs, whatever ranks wrote them.

    Args:
        folder: A published checkpoint.
        tensors: Where to read into, by name.
        group: All ranks; ``None`` for one process.

    Raises:
        CheckpointError: On all ranks, if it fails on one.
    """
    with _one_line_errors(folder):
        load(
            tensors,
            storage_reader=_IndexedReader(folder),
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            process_group=group,
            no_dist=group is None,
        )


def read_index(folder: Path) -> dict[str, SavedTensor]:
    """Read what tensors a checkpoint holds.

    Raises:
        CheckpointError: If the index is missing, damaged, or a tensor's slices do not cover it.
    """
    path = folder / INDEX_NAME
    entries = read_json(path)
    try:
        index = {
            name: SavedTensor(
                dtype=_dtype(entry["dtype"]),
                shape=tuple(entry["shape"]),
                slices=tuple(
                    SavedSlice(tuple(part["offsets"]), tuple(part["sizes"]), part["file"], part["start"], part["bytes"])
                    for part in entry["slices"]
                ),
            )
            for name, entry in entries["tensors"].items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged, {error!r}") from error
    for name, saved in index.items():
        # DCP's planner refuses overlaps when it writes, so equal volumes mean that every element is there.
        num_elements = sum(math.prod(part.sizes) for part in saved.slices)
        if num_elements != math.prod(saved.shape):
            raise CheckpointError(f"{path}: {name} has {num_elements} elements of shape {saved.shape}")
    return index


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return dtype


class _IndexedWriter(FileSystemWriter):
    """DCP's writer, plus ``index.json`` beside its own metadata."""

    def __init__(self, folder: Path) -> None:
        # One thread: DCP drops what its other writer threads raise, and a full disk would go unnoticed.
        super().__init__(folder, sync_files=True, thread_count=1)
        self._folder = folder

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata), f"{name} is no tensor"
            slices = []
            for chunk in stored.chunks:
                place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                slices.append(
                    {
                        "offsets": list(chunk.offsets),
                        "sizes": list(chunk.sizes),
                        "file": place.relative_path,
                        "start": place.offset,
                        "bytes": place.length,
                    }
                )
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(stored.size), "slices": slices}
        write_durably(self._folder / INDEX_NAME, to_json({"tensors": tensors}))


class _IndexedReader(FileSystemReader):
    """DCP's reader, told by ``index.json`` where slices are."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        index = read_index(self._folder)
        stored, places = {}, {}
        for name, saved in index.items():
            chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in saved.slices]
            stored[name] = TensorStorageMetadata(TensorProperties(dtype=saved.dtype), torch.Size(saved.shape), chunks)
            places |= {MetadataIndex(name, part.offsets): part for part in saved.slices}
        return Metadata(state_dict_metadata=stored, storage_data=places)


@contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    """Turn DCP's report, a traceback per rank, into one line about the first failure."""
    try:
        with warnings.catch_warnings():
            # DCP warns that one process is one process.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, CheckpointError):
            raise cause from error
        reason = cause.strerror if isinstance(cause, OSError) else str(cause).splitlines()[0]
        raise CheckpointError(f"{folder}: rank {rank}: {reason or type(cause).__name__}") from error
