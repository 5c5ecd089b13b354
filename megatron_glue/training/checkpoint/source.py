"""Which checkpoint a run starts from, and what it says about the difference between then and now.

The run's own folder goes first. Without a checkpoint in it, ``--load`` names another: a run's folder or one step of it,
which is read only. A damaged checkpoint is refused, unless ``--load-fallback`` allows the newest good one before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import field_specs, flag_of, value_to_word
from megatron_glue.config.loading import as_dict
from megatron_glue.config.sections import RunConfig
from megatron_glue.parallel.collectives import gather_rows
from megatron_glue.training.checkpoint import files
from megatron_glue.training.checkpoint.facts import damage_named
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.state import LoadedCheckpoint, TrainingState
from megatron_glue.training.checkpoint.store import CheckpointStore
from megatron_glue.training.checkpoint.write import FACTS_NAME

_TOLD_SECTIONS = ("model", "moe", "parallel", "data", "optimizer")
_TOLD_FIELDS = ("micro_batch_size", "global_batch_size", "train_iters", "seed", "precision")
_UNTOLD_FIELDS = ("distributed_timeout_minutes",)


@dataclass(frozen=True)
class Source:
    """Checkpoints to start from.

    Attributes:
        paths: The one to take, then those that may stand in for it, newest first.
        is_own: Whether they are the run's own.
    """

    paths: tuple[Path, ...]
    is_own: bool


@dataclass(frozen=True)
class Start:
    """What a run started from.

    Attributes:
        loaded: Its facts.
        path: Its folder.
        warnings: Lines that say why it is this one, to be shown before it is named.
        notes: Lines that say what follows from it.
    """

    loaded: LoadedCheckpoint
    path: Path
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def find_source(store: CheckpointStore, load: str | None) -> Source | None:
    """Look for checkpoints; the first rank looks, all get its answer.

    Args:
        store: The run's own checkpoints.
        load: ``--load``.

    Returns:
        Where to start from; ``None``: from nothing.

    Raises:
        ConfigError: On the first rank, if ``load`` is to be read and holds no checkpoint.
        CheckpointError: On the others then.
    """
    if own := _agree_on_steps(store, store.root):
        return Source(tuple(files.step_folder(store.root, step) for step in own), is_own=True)
    if load is None:
        return None
    folder = Path(load)
    if store.ranks.ask_first(lambda: int((folder / files.MANIFEST_NAME).is_file())):
        return Source((folder,), is_own=False)
    steps = _agree_on_steps(store, folder)
    store.ranks.on_first(lambda: None if steps else _refuse(folder))
    return Source(tuple(files.step_folder(folder, step) for step in steps), is_own=False)


def _refuse(folder: Path) -> None:
    reason = "holds no checkpoint" if folder.is_dir() else "is no folder"
    raise ConfigError(flag_of("load"), folder, reason, "give a run's folder or one of its step_N folders")


def _agree_on_steps(store: CheckpointStore, root: Path) -> list[int]:
    """Steps of a folder that may be started from: the one to resume from, then the earlier ones, newest first."""

    def look() -> list[int]:
        newest = files.latest_step(root)
        return [] if newest is None else sorted((s for s in files.published_steps(root) if s <= newest), reverse=True)

    steps = torch.tensor(store.ranks.on_first(look) or [], dtype=torch.int64)
    return gather_rows(steps, store.ranks.group)[0].tolist()


def load_source(store: CheckpointStore, source: Source, state: TrainingState, *, may_fall_back: bool) -> Start:
    """Load the checkpoint to start from.

    Args:
        store: Reads it.
        source: Where to look.
        state: Read into.
        may_fall_back: Take the next if one is damaged.

    Returns:
        What was loaded, and lines that say from where and what has changed since.

    Raises:
        CheckpointError: If it is damaged, or all are.
        ConfigError: If it is the checkpoint of another model.
    """
    failures: list[tuple[Path, CheckpointError]] = []
    for path in source.paths if may_fall_back else source.paths[:1]:
        try:
            loaded = store.load(path, state)
        except CheckpointError as error:
            failures.append((path, error))
            continue
        if source.is_own:
            store.unreadable_steps.update(
                step for failed, _ in failures if (step := files.step_of(failed.name)) is not None
            )
        with damage_named(path / FACTS_NAME):
            changes = changed_settings(loaded, state.config)
        notes = _notes(store, source, path, changes)
        return Start(loaded, path, _warnings(path, failures), notes)
    error = failures[0][1]
    if len(failures) > 1:
        raise CheckpointError(f"{error}; none of the {len(failures) - 1} checkpoints before it can be read either")
    if len(source.paths) > 1:
        raise CheckpointError(f"{error}; {flag_of('load_fallback')} takes the newest good checkpoint before it")
    raise error


def _warnings(path: Path, failures: list[tuple[Path, CheckpointError]]) -> tuple[str, ...]:
    if not failures:
        return ()
    bad = ", ".join(str(failed) for failed, _ in failures)
    return (f"warning: {bad} cannot be read ({failures[0][1]}); falling back to {path}",)


def _notes(store: CheckpointStore, source: Source, path: Path, changes: list[str]) -> tuple[str, ...]:
    notes = []
    if not source.is_own:
        notes.append(f"new checkpoints go to {store.root}; {path} ({flag_of('load')}) stays as it is")
    if changes:
        notes.append("changed since that checkpoint, the present values count: " + ", ".join(changes))
    return tuple(notes)


def changed_settings(loaded: LoadedCheckpoint, config: RunConfig) -> list[str]:
    """Settings of training whose values are not those that a checkpoint was saved with.

    Where a run writes to, what it shows and which kernels it uses are no settings of training.

    Args:
        loaded: The checkpoint.
        config: The present configuration.

    Returns:
        ``--flag old -> new`` for each.
    """
    present = as_dict(config)
    changes = []
    for name, spec in field_specs().items():
        is_told = spec.path[0] in _TOLD_SECTIONS or name in _TOLD_FIELDS
        if not is_told or name in _UNTOLD_FIELDS:
            continue
        old, new = _value(loaded.config, spec.path, spec.default), _value(present, spec.path, spec.default)
        if old != new:
            changes.append(f"{spec.flag} {value_to_word(spec, old)} -> {value_to_word(spec, new)}")
    return changes


def _value(config: Mapping[str, Any], path: tuple[str, ...], default: Any) -> Any:
    """A field of a saved configuration; one that did not exist then had what is the default now."""
    value: Any = config
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            value = default
            break
        value = value[key]
    return tuple(value) if isinstance(value, list | tuple) else value
