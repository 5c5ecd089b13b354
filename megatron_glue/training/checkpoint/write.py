"""Writes a checkpoint: all ranks together, all or nothing, in the training thread or behind it.

Order: unpublished folder; every rank's slices and what stands where in them, durable; then the first rank puts the
index together, audits it, adds facts and manifest, and publishes by a rename; ``latest``; pruning. Between these
stations all ranks agree whether all is well, so none waits for one that failed, and nothing is published before every
rank's bytes are on the disk.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_glue.config.yaml_files import to_yaml
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.checkpoint import files, tensors
from megatron_glue.training.checkpoint import state as contents
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.index import (
    SavedTensor,
    check_coverage,
    check_experts,
    check_files,
    describe_tensors,
    merge_tensors,
    parse_tensors,
    write_index,
)
from megatron_glue.training.checkpoint.ranks import Ranks
from megatron_glue.training.checkpoint.state import TrainingState
from megatron_glue.training.checkpoint.tensors import NamedPart, WrittenFile

FACTS_NAME = "meta.json"
CONFIG_NAME = "config.yaml"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What is to be written, as it was at the moment of the save.

    Attributes:
        step: Optimizer steps made.
        parts: What this rank writes. They share memory with model and optimizer until they are staged.
        facts: Content of ``meta.json``; empty on all ranks but the first.
        config: Content of ``config.yaml``, likewise.
    """

    step: int
    parts: list[NamedPart]
    facts: bytes
    config: bytes

    @property
    def num_bytes(self) -> int:
        """Size of this rank's tensors."""
        return sum(entry.part.tensor.nbytes for entry in self.parts)


def take_snapshot(step: int, state: TrainingState, mesh: ParallelMesh, ranks: Ranks) -> Snapshot:
    """Decide who writes what, and note everything that is no tensor.

    Args:
        step: Optimizer steps made so far.
        state: What to save.
        mesh: The run's mesh.
        ranks: All ranks; they agree here, in the thread that trains.

    Raises:
        CheckpointError: On all ranks, if anything fails on one.
    """
    try:
        held = ranks.together(
            lambda: contents.collect_tensors(state, mesh) | contents.rng_tensors(contents.device_of(state), mesh)
        )
        parts = ranks.choose_own(held)
        facts = ranks.on_first(lambda: files.to_json(contents.collect_facts(state, step, mesh)))
        config = ranks.on_first(lambda: to_yaml(state.config).encode())
    except CheckpointError as error:
        raise not_saved(step, error) from error
    return Snapshot(step, parts, facts or b"", config or b"")


def write_checkpoint(snapshot: Snapshot, ranks: Ranks, keep_last: int, unreadable: Collection[int] = ()) -> None:
    """Write and publish a checkpoint, then remove old ones.

    Args:
        snapshot: What to write; it must not change meanwhile.
        ranks: All ranks, with a group that no other thread uses.
        keep_last: Complete checkpoints to keep.
        unreadable: Steps that neither count as such nor are removed.

    Raises:
        CheckpointError: On all ranks, if anything fails on one; earlier checkpoints are as they were.
    """
    final = files.step_folder(ranks.root, snapshot.step)
    folder = final.with_name(final.name + files.INCOMPLETE_SUFFIX)
    try:
        ranks.on_first(lambda: files.start_folder(ranks.root, snapshot.step))
        ranks.together(lambda: _write_share(folder, ranks.rank, snapshot.parts))
        ranks.on_first(lambda: _complete(folder, snapshot, ranks.world_size))
    except CheckpointError as error:
        room_mib = ranks.ask_first(lambda: _free_mib(ranks.root))
        # Room is what a full disk needs most. What cannot be removed now, the next save removes.
        ranks.on_first(lambda: shutil.rmtree(folder, ignore_errors=True))
        room = "" if room_mib is None else f"; {room_mib:,} MiB were free in {ranks.root}"
        raise not_saved(snapshot.step, error, room) from error
    still_unreadable = set(unreadable) - {snapshot.step}
    ranks.on_first(lambda: _prune(ranks.root, keep_last, snapshot.step, still_unreadable))


def not_saved(step: int, error: Exception, more: str = "") -> CheckpointError:
    """What a save that failed tells the user."""
    return CheckpointError(f"step {step} was not saved, earlier checkpoints are untouched: {error}{more}")


def _free_mib(root: Path) -> int | None:
    try:
        return round(shutil.disk_usage(root).free / 2**20)
    except OSError:
        return None


def _prune(root: Path, keep_last: int, step: int, unreadable: set[int]) -> None:
    """The new checkpoint is published: that an old one cannot be removed makes it no worse."""
    try:
        files.prune(root, keep_last, step, unreadable)
    except OSError as error:
        logger.warning("%s: old checkpoints cannot be removed: %s", error.filename or root, error.strerror)


def _share_path(folder: Path, rank: int) -> Path:
    return folder / f"share_{rank:05d}.json"


def _write_share(folder: Path, rank: int, parts: list[NamedPart]) -> None:
    """This rank's slices, and a note for the first rank about what was written."""
    note: dict[str, Any] = {"files": {}, "tensors": {}}
    if parts:
        written, index = tensors.write_parts(folder / tensors.slice_file(rank), parts)
        note = {"files": describe_written([written]), "tensors": describe_tensors(index)}
    files.write_durably(_share_path(folder, rank), files.to_json(note))


def describe_written(written: list[WrittenFile]) -> dict[str, Any]:
    """Manifest entries of files of slices."""
    return {file.name: {"bytes": file.num_bytes, "sha256": file.sha256} for file in written}


def _complete(folder: Path, snapshot: Snapshot, world_size: int) -> None:
    """Put together what all ranks wrote, and publish it."""
    paths = [_share_path(folder, rank) for rank in range(world_size)]
    notes = [files.read_json(path) for path in paths]
    index = merge_tensors((parse_tensors(note["tensors"]) for note in notes), folder)
    entries = {name: entry for note in notes for name, entry in note["files"].items()}
    for path in paths:
        path.unlink()
    finish_folder(folder, index, entries, snapshot.facts, snapshot.config)
    files.publish(folder)


def finish_folder(
    folder: Path, index: dict[str, SavedTensor], entries: dict[str, Any], facts: bytes, config: bytes
) -> None:
    """Audit a folder whose slices are all written, and add everything else. Publishing is left to the caller.

    Args:
        folder: The unpublished folder.
        index: Its tensors.
        entries: Manifest entries of its files of slices.
        facts: Content of ``meta.json``.
        config: Content of ``config.yaml``.

    Raises:
        CheckpointError: If an element of a tensor is missing or there twice, a file is not as long as it should be, or
            an expert is missing.
    """
    check_coverage(index, folder)
    check_files(index, {name: (folder / name).stat().st_size for name in entries}, folder)
    check_experts(json.loads(facts)["model"], index, folder)
    files.write_durably(folder / FACTS_NAME, facts)
    files.write_durably(folder / CONFIG_NAME, config)
    write_index(folder, index)
    tensors.write_dcp_metadata(folder, index)
    entries = entries | files.describe_files(path for path in sorted(folder.iterdir()) if path.name not in entries)
    files.write_manifest(folder, entries)
