"""Folders and files of checkpoints: durable writes, the manifest, publishing, finding, pruning.

A checkpoint is a folder ``step_00000010``. While it is being written it is called ``step_00000010.incomplete``; one
rename publishes it, a second one, of ``latest.tmp``, makes the file ``latest`` name it. Everything that needs room on
the disk is written before the first, so that a full disk leaves every earlier checkpoint, and ``latest``, as they were;
so does a kill before it. A kill between the two leaves ``latest.tmp``, which says that the folder it names was
published and is the newest. What else dead processes leave is removed at the next start and at the next save. This file
knows nothing of tensors or ranks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of

LATEST_NAME = "latest"
MANIFEST_NAME = "manifest.json"
INCOMPLETE_SUFFIX = ".incomplete"
_REPLACED_SUFFIX = ".replaced" + INCOMPLETE_SUFFIX
_PROBE_PREFIX = ".write_probe_"
_LATEST_ASIDE = f"{LATEST_NAME}.tmp"
_STEP_NAME = re.compile(r"step_([0-9]{8,19})")
_STEPS_END = 1 << 62
_READ_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; one line that names the file or folder."""


def step_folder(root: Path, step: int) -> Path:
    """Folder of the published checkpoint of one step."""
    return root / f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Step of a checkpoint folder's name; ``None`` for any other name, unpublished folders included.

    Only the name that :func:`step_folder` gives counts: a step has one folder, and fits into what ranks exchange.
    """
    match = _STEP_NAME.fullmatch(name)
    step = int(match.group(1)) if match else _STEPS_END
    return step if step < _STEPS_END and step_folder(Path(), step).name == name else None


def check_writable(root: Path, claim: Callable[[], None] = lambda: None) -> None:
    """Create the folder and write a few bytes there, so that a run fails at its start and not at its first save.

    Args:
        root: Folder of checkpoints.
        claim: Called when the folder is there, and before anything in it is touched; an ``OSError`` of its is told like
            any other.

    Raises:
        ConfigError: If that does not work.
    """
    try:
        make_folder(root)
        claim()
        if (root / LATEST_NAME).is_dir():
            raise ConfigError(
                flag_of("save"), root, f"{root / LATEST_NAME} is a folder, not a file", "remove that folder"
            )
        _tidy(root)
        handle, name = tempfile.mkstemp(prefix=_PROBE_PREFIX, dir=root)
        os.close(handle)
        try:
            write_durably(Path(name), b"probe")
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        reason = "a file is in the way" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(flag_of("save"), root, f"cannot be written: {reason}", "choose a writable folder") from error


def make_folder(folder: Path) -> None:
    """Create a folder and those that it stands in, unless they exist, and wait until their names are on the disk."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(created):
        sync_folder(path.parent)


def _tidy(root: Path) -> None:
    """Complete, put back or remove what killed processes left. Half-written folders stay until the next save starts."""
    if _step_before_latest(root) is not None:
        (root / _LATEST_ASIDE).rename(root / LATEST_NAME)
    for stray in (*root.glob(f"{_PROBE_PREFIX}*"), root / _LATEST_ASIDE):
        if stray.is_file():
            stray.unlink(missing_ok=True)
    for replaced in root.glob(f"step_*{_REPLACED_SUFFIX}"):
        final = replaced.with_name(replaced.name.removesuffix(_REPLACED_SUFFIX))
        if not os.path.lexists(final):
            replaced.rename(final)


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, or a file, or a link, but never what a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and wait until its bytes are on the disk."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network filesystems cannot sync a folder and order renames themselves.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def read_json(path: Path) -> Any:
    """Parse a JSON file of a checkpoint.

    Raises:
        CheckpointError: If it is missing, unreadable or no JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged, not JSON") from error


def to_json(value: Any) -> bytes:
    """JSON text of a checkpoint's file: a line per entry of a mapping, and one per list, which may be long."""
    return (_json_text(value, "") + "\n").encode()


def _json_text(value: Any, margin: str) -> str:
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    inner = margin + " "
    entries = [f"{inner}{json.dumps(str(key))}: {_json_text(entry, inner)}" for key, entry in value.items()]
    return "{\n" + ",\n".join(entries) + f"\n{margin}}}"


def describe_files(paths: Iterable[Path]) -> dict[str, Any]:
    """Manifest entries: size in bytes and SHA-256 of each file, by name."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in paths}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def verify_files(folder: Path, *, part: int = 0, num_parts: int = 1) -> None:
    """Compare files with the manifest.

    Args:
        folder: A published checkpoint.
        part: Which share of the files to read, so that ranks can divide the work.
        num_parts: Number of shares.

    Raises:
        CheckpointError: On the first file that is missing, has another size or other bytes.
    """
    files = read_manifest(folder)
    for name in sorted(files)[part::num_parts]:
        verify_file(folder, name, files[name])


def verify_file(folder: Path, name: str, expected: dict[str, Any]) -> None:
    """Compare one file with its manifest entry.

    Raises:
        CheckpointError: If it is missing, or has another size or other bytes.
    """
    path = folder / name
    try:
        num_bytes = path.stat().st_size
        if num_bytes != expected["bytes"]:
            raise CheckpointError(f"{path}: damaged, {num_bytes} bytes instead of {expected['bytes']}")
        if _digest(path) != expected["sha256"]:
            raise CheckpointError(f"{path}: damaged, its bytes differ from those that were saved")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def listed_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file of a checkpoint, as its manifest says."""
    return {name: entry["bytes"] for name, entry in read_manifest(folder).items()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Entries of a checkpoint's manifest by file; see :func:`describe_files`.

    Raises:
        CheckpointError: If the manifest is missing or damaged.
    """
    manifest = read_json(folder / MANIFEST_NAME)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{folder / MANIFEST_NAME}: damaged, lists no files")
    for name, entry in files.items():
        if not (is_file_name(name) and isinstance(entry, dict) and _is_entry(entry)):
            raise CheckpointError(f"{folder / MANIFEST_NAME}: damaged entry {name[:100]!r}")
    # Those of the first version have no checksum of their own.
    if manifest.get("sha256", _digest_of_list(files)) != _digest_of_list(files):
        raise CheckpointError(f"{folder / MANIFEST_NAME}: damaged, its list differs from the one that was saved")
    return files


def is_file_name(name: str) -> bool:
    """Whether a name leads to an entry of its folder, and can be shown in one line."""
    return name.isprintable() and Path(name).name == name and name != ".."


def _is_entry(entry: dict[str, Any]) -> bool:
    return type(entry.get("bytes")) is int and entry["bytes"] >= 0 and isinstance(entry.get("sha256"), str)


def write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    """Write the list of a checkpoint's files, with a checksum of its own, durably.

    Args:
        folder: The unpublished folder.
        entries: See :func:`describe_files`.
    """
    write_durably(folder / MANIFEST_NAME, to_json({"sha256": _digest_of_list(entries), "files": entries}))


def _digest_of_list(entries: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def start_folder(root: Path, step: int) -> Path:
    """Make room and an empty unpublished folder for a step, and remove leftovers of writers that died.

    Args:
        root: Folder of checkpoints.
        step: Step to be saved.

    Returns:
        The unpublished folder.
    """
    make_folder(root)
    final = step_folder(root, step)
    incomplete = final.with_name(final.name + INCOMPLETE_SUFFIX)
    _tidy(root)
    for leftover in root.glob(f"step_*{INCOMPLETE_SUFFIX}"):
        remove(leftover)
    incomplete.mkdir()
    return incomplete


def publish(incomplete: Path) -> Path:
    """Turn a completely written folder into a checkpoint and name it in ``latest``.

    A published checkpoint of the same step is replaced, and only now: it belongs to a course of the run that was given
    up, or is damaged.

    If ``latest`` cannot be moved, the checkpoint counts all the same: ``latest.tmp`` stays and says so.

    Args:
        incomplete: The unpublished folder; every file in it is durable.

    Returns:
        The published folder.

    Raises:
        OSError: If the folder could not be published, or it is not known whether that is on the disk.
    """
    root = incomplete.parent
    final = incomplete.with_name(incomplete.name.removesuffix(INCOMPLETE_SUFFIX))
    replaced = final.with_name(final.name + _REPLACED_SUFFIX)
    aside = root / _LATEST_ASIDE
    sync_folder(incomplete)
    try:
        write_durably(aside, f"{final.name}\n".encode())
        sync_folder(root)
        if os.path.lexists(final):
            final.rename(replaced)
        incomplete.rename(final)
    except OSError:
        _tidy(root)
        raise
    sync_folder(root)
    try:
        aside.rename(root / LATEST_NAME)
    except OSError as error:
        logger.warning("%s is published, but latest still names an earlier checkpoint: %s", final, error.strerror)
    sync_folder(root)
    remove(replaced)
    return final


def prune(root: Path, keep_last: int, newest_step: int, unreadable: Collection[int] = ()) -> None:
    """Remove old checkpoints. Those of later steps stay: somebody went back on purpose and may want them.

    Args:
        root: Folder of checkpoints.
        keep_last: Checkpoints to keep, at least 1.
        newest_step: The one published last; it counts as the first of those to keep.
        unreadable: Steps known to be damaged. They stay, for whoever wants to look, and do not count: a good one that
            had to go for a damaged one would be missed.
    """
    steps = sorted(step for step in published_steps(root) if step <= newest_step and step not in unreadable)
    for step in steps[:-keep_last]:
        folder = step_folder(root, step)
        # Renamed first: a half-removed folder must not look like a checkpoint.
        doomed = folder.with_name(folder.name + INCOMPLETE_SUFFIX)
        folder.rename(doomed)
        remove(doomed)


def published_steps(root: Path) -> list[int]:
    """Steps of all checkpoints in a folder, in no order; empty if there is no such folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        steps = (step_of(path.name) for path in root.iterdir() if (path / MANIFEST_NAME).is_file())
        return [step for step in steps if step is not None]
    return []


def latest_step(root: Path) -> int | None:
    """Step to resume from: the one that ``latest`` names if it is there, else the highest published one.

    Whoever wants to go back writes an older folder's name into ``latest``. If a process was killed after it had
    published a folder and before it could move ``latest``, that folder counts, unless ``latest`` was written since.

    Args:
        root: Folder of checkpoints; need not exist.

    Returns:
        The step, or ``None`` if there is no checkpoint.
    """
    if (unnamed := _step_before_latest(root)) is not None:
        return unnamed
    published = published_steps(root)
    named = named_step(root)
    if named in published:
        return named
    return max(published, default=None)


def named_step(root: Path) -> int | None:
    """Step of the folder that ``latest`` names; ``None`` if there is no such file or it holds something else."""
    return _step_in(root / LATEST_NAME)


def _step_in(path: Path) -> int | None:
    try:
        return step_of(path.read_text(errors="replace").strip())
    except OSError:
        return None


def _step_before_latest(root: Path) -> int | None:
    """Step of a folder that was published, but not named in ``latest`` any more; ``None`` in the usual case."""
    aside = root / _LATEST_ASIDE
    step = _step_in(aside)
    if step is None or step not in published_steps(root):
        return None
    final = step_folder(root, step)
    if final.with_name(final.name + INCOMPLETE_SUFFIX).exists():
        # Not published yet: the folder of that name belongs to a course that was given up.
        return None
    with contextlib.suppress(OSError):
        if (root / LATEST_NAME).stat().st_mtime_ns > aside.stat().st_mtime_ns:
            return None
    return step
