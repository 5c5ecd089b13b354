"""The checkpoints of one run: which there are, saving one, loading one. All ranks together, all or nothing.

``write.py`` writes, ``background.py`` does so behind the training thread, ``files.py`` knows folders, ``index.py`` and
``tensors.py`` what lies in them, ``state.py`` what is saved, ``parts.py`` what a rank holds of it. ``saving.py``
decides what a failure means for the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.checkpoint import files, tensors
from megatron_glue.training.checkpoint import state as contents
from megatron_glue.training.checkpoint.facts import check_facts, damage_named
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.index import INDEX_NAME, SavedTensor, check_experts, check_files, read_index
from megatron_glue.training.checkpoint.lock import FolderLock, FolderTakenError
from megatron_glue.training.checkpoint.parts import GlobalTensor
from megatron_glue.training.checkpoint.ranks import Ranks
from megatron_glue.training.checkpoint.state import LoadedCheckpoint, TrainingState
from megatron_glue.training.checkpoint.write import FACTS_NAME, Snapshot, take_snapshot, write_checkpoint

__all__ = ["CheckpointError", "CheckpointStore", "LoadedCheckpoint", "TrainingState"]


class CheckpointStore:
    """The checkpoints of one run in one folder. Every method is called by all ranks.

    Args:
        root: Folder that all ranks see.
        keep_last: Complete checkpoints to keep.
        mesh: The run's mesh.

    Attributes:
        root: The folder.
        ranks: The ranks, as the training thread knows them.
        step_on_disk: Step that this process has saved or loaded last and that nothing has to be written for.
        unreadable_steps: Steps of this folder that this process found to be damaged, and has not written anew.
    """

    def __init__(self, root: str | Path, keep_last: int, mesh: ParallelMesh) -> None:
        self.root = Path(root)
        self.ranks = Ranks(mesh.rank, mesh.world_size, mesh.world_group, self.root)
        self.step_on_disk: int | None = None
        self.unreadable_steps: set[int] = set()
        self._keep_last = keep_last
        self._mesh = mesh
        self._lock = FolderLock(self.root)

    def prepare(self) -> None:
        """Create the folder and try to write there, before the run computes anything.

        Raises:
            ConfigError: On the first rank, if that fails.
            CheckpointError: On the others then.
        """
        self.ranks.on_first(lambda: files.check_writable(self.root))

    def claim(self) -> None:
        """As :meth:`prepare`, and keep every other run out of the folder until :meth:`release` or the process' end.

        Raises:
            ConfigError: On all ranks, if another run writes there; else as in :meth:`prepare`.
        """

        def is_taken() -> int:
            try:
                files.check_writable(self.root, self._lock.acquire)
            except FolderTakenError:
                return 1
            return 0

        if self.ranks.ask_first(is_taken):
            raise ConfigError(
                flag_of("save"), self.root, "another run writes into it", "wait for its end, or choose another folder"
            )

    def release(self) -> None:
        """Let other runs write into the folder; no collective, so that a rank may do so however it leaves."""
        self._lock.release()

    def find_latest(self) -> Path | None:
        """The checkpoint to resume from; ``None`` if there is none. The first rank looks, all get its answer."""
        step = self.ranks.ask_first(lambda: files.latest_step(self.root))
        return None if step is None else files.step_folder(self.root, step)

    def path_of(self, step: int) -> Path:
        """Folder of a step."""
        return files.step_folder(self.root, step)

    def save(self, step: int, state: TrainingState) -> bool:
        """Write a checkpoint.

        Args:
            step: Optimizer steps made so far.
            state: What to save.

        Returns:
            Whether it was written; it is not if this process has just saved this step, or resumed from it.

        Raises:
            CheckpointError: On all ranks, if anything fails on one; earlier checkpoints are as they were.
        """
        if step == self.step_on_disk:
            return False
        self.write(take_snapshot(step, state, self._mesh, self.ranks), self.ranks)
        self.step_on_disk = step
        return True

    def snapshot(self, step: int, state: TrainingState) -> Snapshot:
        """What :meth:`write` is to write later; it shares memory with the state."""
        return take_snapshot(step, state, self._mesh, self.ranks)

    def write(self, snapshot: Snapshot, ranks: Ranks) -> None:
        """Write and publish a snapshot, over the group of the calling thread; see :func:`write_checkpoint`."""
        write_checkpoint(snapshot, ranks, self._keep_last, self.unreadable_steps)
        self.unreadable_steps.discard(snapshot.step)

    def load(self, path: str | Path, state: TrainingState) -> LoadedCheckpoint:
        """Read a checkpoint into model, optimizer and random generators, after checking every byte of it.

        The layout may differ from the one that saved it. Generators are restored where this rank had one.

        Args:
            path: A published checkpoint.
            state: Read into; its counters and data position are not.

        Returns:
            The saved facts.

        Raises:
            CheckpointError: If a file is missing or damaged, or the tensors do not fit. Nothing was read into then.
            ConfigError: If it is the checkpoint of another model.
        """
        path, ranks = Path(path), self.ranks
        wanted = ranks.together(lambda: contents.collect_tensors(state, self._mesh))
        ranks.together(lambda: files.verify_files(path, part=ranks.rank, num_parts=ranks.world_size))
        # All read the same bytes, as their checksums say: one audit is as good as one per rank.
        facts, index = ranks.together(lambda: read_facts_and_index(path, must_audit=ranks.is_first))
        ranks.together(lambda: _check_same_model(facts["model"], state, path / FACTS_NAME))
        known = ranks.union_of(sorted(index), set(wanted))
        ranks.together(lambda: contents.check_same_tensors(index, wanted, path, known))
        generators = ranks.together(lambda: self._saved_generators(state, index))
        ranks.together(lambda: tensors.read_parts(path, index, wanted | generators))
        ranks.together_in_collectives(state.after_load)
        ranks.together(lambda: contents.restore_rng(generators, contents.device_of(state)))
        if state.optimizer is not None:
            state.optimizer.num_skipped_updates = facts["num_skipped_updates"]
        if path.parent == self.root:
            self.step_on_disk = facts["step"]
        return LoadedCheckpoint(
            facts["step"], facts["counters"], facts["data_position"], facts["config"], facts.get("decisions", {})
        )

    def _saved_generators(self, state: TrainingState, index: dict[str, SavedTensor]) -> dict[str, GlobalTensor]:
        """Where to read the states of generators that this rank has and the checkpoint too."""
        own = contents.rng_tensors(contents.device_of(state), self._mesh) if state.optimizer is not None else {}
        return {name: tensor for name, tensor in own.items() if name in index}


def read_facts_and_index(path: Path, *, must_audit: bool = True) -> tuple[dict[str, Any], dict[str, SavedTensor]]:
    """Read everything of a checkpoint but its tensors, and audit what it says about them.

    Args:
        path: A published checkpoint.
        must_audit: Whether to audit; a rank need not if another does and its outcome is shared.

    Returns:
        Content of ``meta.json``, and the index.

    Raises:
        CheckpointError: If a file is missing, damaged or of another format, or tensors are not there exactly once.
    """
    facts = files.read_json(path / FACTS_NAME)
    if not isinstance(facts, dict) or facts.get("format") != contents.FORMAT:
        found = facts.get("format") if isinstance(facts, dict) else None
        raise CheckpointError(f"{path / FACTS_NAME}: format {found}, expected {contents.FORMAT}")
    check_facts(facts, path / FACTS_NAME)
    index = read_index(path, must_audit=must_audit)
    if not must_audit:
        return facts, index
    used = {part.relative_path for saved in index.values() for part in saved.slices}
    # Also files of slices that the index does not name: it may have lost tensors, or all of them.
    sizes = {
        name: size
        for name, size in files.listed_sizes(path).items()
        if name in used or name.endswith(tensors.SLICES_SUFFIX)
    }
    with damage_named(path / INDEX_NAME):
        check_files(index, sizes, path)
        check_experts(facts["model"], index, path)
    return facts, index


def _check_same_model(saved: dict[str, Any], state: TrainingState, file: Path) -> None:
    with damage_named(file):
        contents.check_same_model(saved, state.config, file)
