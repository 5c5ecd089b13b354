"""Looks at checkpoints without a model: finds, verifies and describes them, in one process, without reading tensors.

For tools; ``rewrite.py`` makes new ones of old ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_glue.config.errors import ConfigError
from megatron_glue.training.checkpoint import files
from megatron_glue.training.checkpoint.index import SavedTensor
from megatron_glue.training.checkpoint.store import read_facts_and_index

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


def no_progress(done: int, total: int) -> None:
    """For callers that show none."""


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose facts and index were read and audited.

    Attributes:
        path: Its folder.
        facts: Content of ``meta.json``.
        index: Its tensors.
    """

    path: Path
    facts: dict[str, Any]
    index: dict[str, SavedTensor]

    @property
    def step(self) -> int:
        """Optimizer steps made when it was saved."""
        return self.facts["step"]


def find_checkpoints(folder: str | Path, last: int | None = None) -> list[Path]:
    """Resolve what a user gave: a checkpoint's own folder, or that of a run.

    Args:
        folder: The folder.
        last: For a run, how many of its newest; ``None``: all of them.

    Returns:
        Checkpoints, oldest first. The newest of a run is the one that ``latest`` names.

    Raises:
        ConfigError: If there is none.
    """
    path = Path(folder)
    if (path / files.MANIFEST_NAME).is_file():
        return [path]
    newest = files.latest_step(path)
    if newest is None:
        reason = "holds no checkpoint" if path.is_dir() else "is no folder"
        raise ConfigError("DIR", path, reason, "give a run's folder or one of its step_N folders")
    steps = sorted(step for step in files.published_steps(path) if step <= newest)
    return [files.step_folder(path, step) for step in steps[-last if last else 0 :]]


def open_checkpoint(path: Path) -> OpenCheckpoint:
    """Read everything but tensors, and audit it.

    Raises:
        CheckpointError: If that shows damage.
    """
    facts, index = read_facts_and_index(path)
    return OpenCheckpoint(path, facts, index)


def verify(path: Path, progress: Progress = no_progress) -> OpenCheckpoint:
    """Compare every file with its checksum, and audit the index.

    Args:
        path: A published checkpoint.
        progress: Told about files as they are read.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: On the first file that is damaged or missing, or the first tensor that is not all there.
    """
    entries = files.read_manifest(path)
    total = sum(entry["bytes"] for entry in entries.values())
    done = 0
    for name in sorted(entries):
        files.verify_file(path, name, entries[name])
        done += entries[name]["bytes"]
        progress(done, total)
    return open_checkpoint(path)


def describe_checkpoint(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """What ``info`` tells, as JSON values."""
    sizes = files.listed_sizes(checkpoint.path)
    facts = checkpoint.facts
    losses = facts["counters"].get("losses") or [None]
    kinds: dict[str, dict[str, int]] = {}
    for name, saved in checkpoint.index.items():
        kind = kinds.setdefault(name.split(".", 1)[0], {"tensors": 0, "elements": 0, "bytes": 0})
        kind["tensors"] += 1
        kind["elements"] += saved.num_bytes // saved.dtype.itemsize
        kind["bytes"] += saved.num_bytes
    return {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        "version": facts["version"],
        "torch": facts["torch"],
        "layout": facts["layout"],
        "origin": facts.get("origin"),
        "last_loss": losses[-1],
        "data_position": {key: value for key, value in facts["data_position"].items() if key != "stream"},
        "skipped_updates": facts["num_skipped_updates"],
        "model": facts["model"],
        "settings": facts["provenance"],
        "kinds": kinds,
        "files": sizes,
        "bytes": sum(sizes.values()),
        "tensors": {
            name: {
                "shape": list(saved.shape),
                "dtype": str(saved.dtype).removeprefix("torch."),
                "bytes": saved.num_bytes,
                "slices": len(saved.slices),
            }
            for name, saved in checkpoint.index.items()
        },
        "config": facts["config"],
    }
