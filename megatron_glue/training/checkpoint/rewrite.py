"""Makes new checkpoints of old ones, in one process and tensor by tensor: other files, or averaged weights.

Memory for about two copies of the largest tensor is enough, however large the checkpoint. What is written is audited
and published like any other save: a folder appears under its name only when it is complete.
"""

from __future__ import annotations

import heapq
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_glue.config.errors import ConfigError
from megatron_glue.training.checkpoint import files
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.index import INDEX_NAME, SavedTensor, merge_tensors
from megatron_glue.training.checkpoint.inspect import OpenCheckpoint, Progress, no_progress
from megatron_glue.training.checkpoint.parts import GlobalTensor
from megatron_glue.training.checkpoint.tensors import (
    DCP_METADATA_NAME,
    SLICES_SUFFIX,
    NamedPart,
    read_parts,
    slice_file,
    write_parts,
)
from megatron_glue.training.checkpoint.write import CONFIG_NAME, FACTS_NAME, describe_written, finish_folder


@dataclass(frozen=True, eq=False)
class Content:
    """What a new checkpoint is to hold.

    Attributes:
        index: Its tensors; where their slices are does not matter.
        facts: Content of ``meta.json``.
        config: Content of ``config.yaml``.
    """

    index: Mapping[str, SavedTensor]
    facts: dict[str, Any]
    config: bytes

    @classmethod
    def of(cls, source: OpenCheckpoint, origin: dict[str, Any]) -> Content:
        """That of another checkpoint.

        Raises:
            CheckpointError: If its configuration cannot be read.
        """
        try:
            return cls(source.index, {**source.facts, "origin": origin}, (source.path / CONFIG_NAME).read_bytes())
        except OSError as error:
            raise CheckpointError(f"{error.filename}: {error.strerror}") from error


def read_tensor(checkpoint: OpenCheckpoint, name: str) -> Tensor:
    """Read one whole tensor to host memory."""
    saved = checkpoint.index[name]
    target = GlobalTensor.whole(torch.empty(saved.shape, dtype=saved.dtype))
    read_parts(checkpoint.path, checkpoint.index, {name: target})
    return target.parts[0].tensor


def reshard(source: OpenCheckpoint, destination: Path, num_shards: int = 1, progress: Progress = no_progress) -> Path:
    """Write the same tensors, bit for bit, into another number of files.

    Args:
        source: A verified checkpoint.
        destination: A folder that does not exist; a run can ``--load`` it.
        num_shards: Number of files, at most that of tensors; every tensor is whole in one of them.
        progress: Told about bytes as they are written.

    Returns:
        The destination.

    Raises:
        CheckpointError: If something cannot be read or written; the destination does not exist then.
        ConfigError: If the destination exists.
    """
    origin = {"resharded_from": str(source.path), "files": min(num_shards, len(source.index))}
    content = Content.of(source, origin)
    return write_new(content, destination, lambda name: read_tensor(source, name), num_shards, progress)


def average(
    sources: Sequence[OpenCheckpoint], destination: Path, num_shards: int = 1, progress: Progress = no_progress
) -> Path:
    """Write a checkpoint whose weights are the mean of several (Polyak averaging; stochastic weight averaging,
    arXiv:1803.05407).

    Every floating-point tensor of the model, balancing biases included, is averaged in fp64 and rounded once. All else
    is that of the newest: Adam's moments, counters, the position in the data, generators.

    Args:
        sources: Verified checkpoints of one model; the one with the highest step is the newest, of equal ones the last.
        destination: A folder that does not exist; a run can ``--load`` it.
        num_shards: Number of files.
        progress: Told about bytes as they are written.

    Returns:
        The destination.

    Raises:
        CheckpointError: If the sources do not fit each other, or something cannot be read or written.
        ConfigError: If the destination exists, or there is nothing to average.
    """
    if len(sources) < 2:
        raise ConfigError("DIR", sources[0].path if sources else "", "one checkpoint has no average", "give several")
    newest = newest_of(sources)
    for other in sources:
        _check_alike(newest, other)
    origin = {"average_of": [str(source.path) for source in sources], "all_but_weights_from": str(newest.path)}

    def mean(name: str) -> Tensor:
        dtype = newest.index[name].dtype
        if not name.startswith("model.") or not dtype.is_floating_point:
            return read_tensor(newest, name)
        total = torch.zeros(newest.index[name].shape, dtype=torch.float64)
        for source in sources:
            total += read_tensor(source, name)
        return (total / len(sources)).to(dtype)

    return write_new(Content.of(newest, origin), destination, mean, num_shards, progress)


def newest_of(sources: Sequence[OpenCheckpoint]) -> OpenCheckpoint:
    """The checkpoint that everything but averaged weights comes from."""
    return max(reversed(sources), key=lambda source: source.step)


def _check_alike(one: OpenCheckpoint, other: OpenCheckpoint) -> None:
    if one.facts["model"] != other.facts["model"]:
        names = [name for name in one.facts["model"] if one.facts["model"][name] != other.facts["model"].get(name)]
        raise CheckpointError(f"{other.path}: another model than {one.path} ({', '.join(names) or 'more settings'})")
    for name, saved in one.index.items():
        found = other.index.get(name)
        if name.startswith("model.") and (found is None or (found.shape, found.dtype) != (saved.shape, saved.dtype)):
            there = "is missing" if found is None else f"is {found.shape} {found.dtype}"
            raise CheckpointError(f"{other.path}: {name} {there}, in {one.path} it is {saved.shape} {saved.dtype}")


def shards_of(index: Mapping[str, SavedTensor], num_shards: int) -> list[list[str]]:
    """Deal tensors to files of about the same size, the largest first.

    Args:
        index: The tensors.
        num_shards: Number of files; there are no more of them than tensors.

    Returns:
        Names per file, in their order.
    """
    shards: list[list[str]] = [[] for _ in range(min(num_shards, len(index)))]
    loads = [(0, number) for number in range(len(shards))]
    for name in sorted(index, key=lambda name: (-index[name].num_bytes, name)):
        load, lightest = loads[0]
        heapq.heapreplace(loads, (load + max(index[name].num_bytes, 1), lightest))
        shards[lightest].append(name)
    return [sorted(shard) for shard in shards]


def write_new(
    content: Content,
    destination: Path,
    read: Callable[[str], Tensor],
    num_shards: int = 1,
    progress: Progress = no_progress,
) -> Path:
    """Write a checkpoint tensor by tensor.

    Args:
        content: What it holds.
        destination: A folder that does not exist.
        read: Returns the whole tensor of a name.
        num_shards: Number of files.
        progress: Told about bytes as they are written.

    Returns:
        The destination.

    Raises:
        CheckpointError: If something cannot be read or written; the destination does not exist then.
        ConfigError: If the destination exists, or something that is no leftover of ours where it is to be written.
    """
    if os.path.lexists(destination):
        raise ConfigError("DESTINATION", destination, "exists already", "name a new folder, or remove this one")
    folder = destination.with_name(destination.name + files.INCOMPLETE_SUFFIX)
    if os.path.lexists(folder) and not _is_leftover(folder):
        raise ConfigError(
            "DESTINATION",
            destination,
            f"it would be written to {folder}, which holds something else",
            "name another folder, or move that one away",
        )
    total, done = sum(saved.num_bytes for saved in content.index.values()), 0

    def parts(names: list[str]) -> Iterator[NamedPart]:
        nonlocal done
        for name in names:
            saved = content.index[name]
            yield NamedPart(name, saved.shape, GlobalTensor.whole(read(name)).parts[0])
            done += saved.num_bytes
            progress(done, total)

    try:
        files.remove(folder)
        files.make_folder(folder)
        written, indexes = [], []
        for number, names in enumerate(shards_of(content.index, num_shards)):
            file, index = write_parts(folder / slice_file(number), parts(names))
            written.append(file)
            indexes.append(index)
        facts = files.to_json(content.facts)
        finish_folder(folder, merge_tensors(indexes, folder), describe_written(written), facts, content.config)
        files.sync_folder(folder)
        folder.rename(destination)
        files.sync_folder(destination.parent)
    except BaseException as error:
        # Ctrl-C and SIGTERM, too, leave nothing behind.
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{error.filename or folder}: {error.strerror or error}") from error
        raise
    return destination


def _is_leftover(folder: Path) -> bool:
    """Whether a killed process left it: a folder with nothing in it but what a checkpoint is made of."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    own = {FACTS_NAME, CONFIG_NAME, INDEX_NAME, files.MANIFEST_NAME}
    names = (path.name for path in folder.iterdir())
    return all(name in own or name.endswith(SLICES_SUFFIX) or name.startswith(DCP_METADATA_NAME) for name in names)
