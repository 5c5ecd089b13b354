"""Saves and restores a run: all ranks together, all or nothing.

Order of a save: unpublished folder, every rank's slices (durable), every rank's checksums of its own files, facts and
manifest, a check of the whole, the rename that publishes, ``latest``, pruning. Between these stations all ranks agree
whether all is well, so none waits for one that failed; what is no collective has a station of its own, before those
that are. Stands between two optimizer steps; it blocks them.

``checkpoint_files.py`` knows folders, ``checkpoint_tensors.py`` tensors on disk, ``checkpoint_state.py`` what is saved.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.yaml_files import to_yaml
from megatron_glue.parallel.agreement import PeerFailedError, together
from megatron_glue.parallel.collectives import max_over_ranks
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training import checkpoint_files as files
from megatron_glue.training import checkpoint_state as contents
from megatron_glue.training.checkpoint_files import CheckpointError
from megatron_glue.training.checkpoint_state import LoadedCheckpoint, TrainingState
from megatron_glue.training.checkpoint_tensors import SavedTensor, read_index, read_tensors, write_tensors

__all__ = ["CheckpointError", "CheckpointStore", "LoadedCheckpoint", "TrainingState"]

FACTS_NAME = "meta.json"
CONFIG_NAME = "config.yaml"
T = TypeVar("T")

logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run in one folder. Every method is called by all ranks.

    Args:
        root: Folder that all ranks see.
        keep_last: Complete checkpoints to keep.
        mesh: The run's mesh.
    """

    def __init__(self, root: str | Path, keep_last: int, mesh: ParallelMesh) -> None:
        self.root = Path(root)
        self._keep_last = keep_last
        self._mesh = mesh
        self._group = mesh.world_group

    def prepare(self) -> None:
        """Create the folder and try to write there, before the run computes anything.

        Raises:
            ConfigError: On the first rank, if that fails.
            CheckpointError: On the others then.
        """
        self._together(lambda: files.check_writable(self.root) if self._is_first else None)

    def find_latest(self) -> Path | None:
        """The checkpoint to resume from; ``None`` if there is none. The first rank looks, all get its answer."""
        step = self._ask_first(lambda: files.latest_step(self.root))
        return None if step is None else files.step_folder(self.root, step)

    def save(self, step: int, state: TrainingState) -> Path:
        """Write a checkpoint.

        A step that ``latest`` names is not written again: the run has just saved it, or resumed from it.

        Args:
            step: Optimizer steps made so far.
            state: What to save.

        Returns:
            The published folder.

        Raises:
            CheckpointError: On all ranks, if anything fails on one; earlier checkpoints are as they were.
        """
        final = files.step_folder(self.root, step)
        if self._ask_first(lambda: step if files.is_current(self.root, step) else None) is not None:
            return final
        folder = final.with_name(final.name + files.INCOMPLETE_SUFFIX)
        try:
            self._together(lambda: files.start_folder(self.root, step) if self._is_first else None)
            tensors = self._together(lambda: self._tensors_to_save(state))
            self._together(lambda: write_tensors(folder, tensors, self._group))
            self._together(lambda: self._describe_share(folder))
            self._together(lambda: self._complete(folder, state, step) if self._is_first else None)
        except CheckpointError as error:
            # torch reports a full disk as an inconsistent file, so say how much room there was.
            room = f"{shutil.disk_usage(self.root).free / 2**20:,.0f} MiB were free in {self.root}"
            # Room is what a full disk needs most. What cannot be removed now, the next save removes.
            self._together(lambda: shutil.rmtree(folder, ignore_errors=True) if self._is_first else None)
            raise CheckpointError(
                f"step {step} was not saved, earlier checkpoints are untouched: {error}; {room}"
            ) from error
        self._together(lambda: files.prune(self.root, self._keep_last, step) if self._is_first else None)
        return final

    def load(self, path: str | Path, state: TrainingState) -> LoadedCheckpoint:
        """Read a checkpoint into model, optimizer and random generators, after checking every byte of it.

        The layout may differ from the one that saved it. Generators are restored where this rank had one.

        Args:
            path: A published checkpoint.
            state: Read into; its counters and data position are not.

        Returns:
            The saved facts.

        Raises:
            CheckpointError: If a file is missing or damaged, or the tensors do not fit.
            ConfigError: If it is the checkpoint of another model.
        """
        path = Path(path)
        tensors = self._together(lambda: contents.collect_tensors(state, self._mesh))
        self._together(lambda: files.verify_files(path, part=self._mesh.rank, num_parts=self._mesh.world_size))
        facts, index = self._together(lambda: self._check_fit(path, state, tensors))
        generators = self._together(lambda: self._saved_generators(state, index))
        self._together(lambda: read_tensors(path, tensors | generators, self._group))
        self._together(lambda: contents.restore_rng(generators, _device_of(state)))
        if state.optimizer is not None:
            state.optimizer.num_skipped_updates = facts["num_skipped_updates"]
        return LoadedCheckpoint(facts["step"], facts["counters"], facts["data_position"], facts["config"])

    def _tensors_to_save(self, state: TrainingState) -> dict[str, Tensor]:
        return contents.collect_tensors(state, self._mesh) | contents.rng_tensors(_device_of(state), self._mesh)

    def _saved_generators(self, state: TrainingState, index: dict[str, SavedTensor]) -> dict[str, Tensor]:
        """Where to read the states of generators that this rank has and the checkpoint too."""
        own = contents.rng_tensors(_device_of(state), self._mesh) if state.optimizer is not None else {}
        return {name: tensor for name, tensor in own.items() if name in index}

    def _describe_share(self, folder: Path) -> None:
        """The checksums of the files that this rank's tensors went to."""
        own = sorted(folder.glob(f"__{self._mesh.rank}_*"))
        files.write_durably(self._share_path(folder, self._mesh.rank), files.to_json(files.describe_files(own)))

    def _complete(self, folder: Path, state: TrainingState, step: int) -> None:
        """Facts and manifest; then check and publish."""
        facts = contents.collect_facts(state, step, self._mesh)
        files.write_durably(folder / FACTS_NAME, files.to_json(facts))
        files.write_durably(folder / CONFIG_NAME, to_yaml(state.config).encode())
        shares = [self._share_path(folder, rank) for rank in range(self._mesh.world_size)]
        entries = {name: entry for share in shares for name, entry in files.read_json(share).items()}
        for share in shares:
            share.unlink()
        entries |= files.describe_files(path for path in folder.iterdir() if path.name not in entries)
        for name, saved in read_index(folder).items():
            for part in saved.slices:
                if part.offset + part.length > entries.get(part.relative_path, {"bytes": 0})["bytes"]:
                    raise CheckpointError(f"{folder / part.relative_path}: a part of {name} is not there")
        files.write_durably(folder / files.MANIFEST_NAME, files.to_json({"files": entries}))
        files.publish(folder)

    def _check_fit(
        self, path: Path, state: TrainingState, tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, SavedTensor]]:
        facts = files.read_json(path / FACTS_NAME)
        if facts.get("format") != contents.FORMAT:
            raise CheckpointError(f"{path / FACTS_NAME}: format {facts.get('format')}, expected {contents.FORMAT}")
        contents.check_same_model(facts["model"], state.config, path)
        index = read_index(path)
        contents.check_same_tensors(index, tensors, path)
        return facts, index

    @property
    def _is_first(self) -> bool:
        return self._mesh.rank == 0

    @staticmethod
    def _share_path(folder: Path, rank: int) -> Path:
        return folder / f"manifest_{rank:05d}.json"

    def _ask_first(self, question: Callable[[], int | None]) -> int | None:
        """The first rank's answer, a number that is not negative, or nothing."""
        answer = self._together(lambda: question() if self._is_first else None)
        shared = max_over_ranks(-1 if answer is None else answer, self._group)
        return None if shared < 0 else shared

    def _together(self, work: Callable[[], T]) -> T:
        """Do this rank's part; return once all ranks have done theirs, raise on all if one failed.

        ``work`` is either no collective, or one that ends on all ranks alike, as those of DCP do.

        Raises:
            ConfigError: Where ``work`` raised it.
            CheckpointError: On all other ranks then; and on all ranks if ``work`` raised anything else.
        """

        def own_part() -> T:
            try:
                return work()
            except Exception as error:
                raise self._as_one_line(error) from error

        try:
            return together(own_part, self._group)
        except PeerFailedError as error:
            raise CheckpointError(str(error)) from error

    def _as_one_line(self, error: Exception) -> CheckpointError | ConfigError:
        """What a rank raises instead of an error, so that all ranks see the same kind and take the same way on."""
        if isinstance(error, CheckpointError | ConfigError):
            return error
        if isinstance(error, OSError):
            line = f"{error.filename or self.root}: {error.strerror or error}"
        else:
            logger.debug("an error that is no full disk and no damaged file", exc_info=error)
            line = f"{self.root}: {type(error).__name__}: {' '.join(str(error).split())}"
        return CheckpointError(line)


def _device_of(state: TrainingState) -> torch.device:
    return next(state.model.parameters()).device
