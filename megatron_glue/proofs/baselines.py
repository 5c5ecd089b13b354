"""Baselines on the disk: one folder per version of the code, in an archive folder per job.

A record holds what a short run measured (``record.json``, ``losses.csv``), with what it ran (``environment.json``,
``packages.txt``) and as what (``config.yaml``), so that the way back to it is written down. It is written aside and
renamed, and a record that exists is kept unless its replacement is asked for. How a run is measured stands in
``gate_run.py``, what may differ in ``gate.py``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_glue.config.errors import ConfigError
from megatron_glue.proofs.packages import read_requirements, to_requirements
from megatron_glue.training.summary import write_json, write_text

RECORD_NAME, ENVIRONMENT_NAME, PACKAGES_NAME = "record.json", "environment.json", "packages.txt"
CONFIG_NAME, LOSSES_NAME = "config.yaml", "losses.csv"
OBSERVED_KEYS = {"run", "losses", "grad_norms", "heldout", "outputs", "tokens_per_second", "peak_memory_bytes"}


@dataclass(frozen=True)
class Record:
    """A measured run and what it was made with.

    Attributes:
        name: Version and revision of the code.
        observed: What ``gate_run.observe_run`` returned.
        environment: As in ``env.json`` of a run's folder.
        packages: Name -> line of a requirements file.
        config_yaml: The configuration as it was asked for, every field.
    """

    name: str
    observed: dict[str, Any]
    environment: dict[str, Any]
    packages: dict[str, str]
    config_yaml: str


def record_name(software: Mapping[str, str], label: str = "") -> str:
    """Name the code: its version and git revision, with a digest of the source where a revision does not say all.

    Args:
        software: As ``run_environment.software`` returns it.
        label: What else the record is told apart by, as a torch or driver on trial; empty for nothing.

    Raises:
        ConfigError: If the label is no part of a folder's name.
    """
    if not re.fullmatch(r"[\w.+-]*", label, re.ASCII):
        raise ConfigError("--label", label, "is no part of a folder's name", "use letters, digits and . _ + -")
    revision, source = software["git revision"], software["source"]
    if revision == "none":
        revision = f"source-{source}"
    elif not re.fullmatch(r"[0-9a-f]+", revision):
        revision = f"{revision}-{source}"
    return "-".join(filter(None, (software["megatron_glue"], revision, label)))


def check_room(archive: Path, name: str, *, may_replace: bool) -> None:
    """Find out before a run whether its record can be written.

    Raises:
        ConfigError: If the archive cannot be made, or has that record already.
    """
    if (archive / name).exists() and not may_replace:
        reason = "is there already; a record is not overwritten by accident"
        raise ConfigError(
            "--archive", archive / name, reason, "add --label or --replace, or take another folder for another job"
        )
    try:
        archive.mkdir(parents=True, exist_ok=True)
        aside = _aside(archive, name)
        aside.mkdir()
        aside.rmdir()
    except OSError as error:
        reason = f"cannot be written ({(error.strerror or str(error)).lower()})"
        raise ConfigError("--archive", archive, reason, "give a folder that you own") from error


def write_record(archive: Path, record: Record, *, may_replace: bool) -> Path:
    """Write a record aside and rename it.

    Args:
        archive: Folder of one job's records; made if missing.
        record: What to write.
        may_replace: Whether a record of the same name gives way.

    Returns:
        Its folder.

    Raises:
        ConfigError: If it is there and may not be replaced.
        OSError: If it cannot be written; nothing of it stays.
    """
    check_room(archive, record.name, may_replace=may_replace)
    target, aside = archive / record.name, _aside(archive, record.name)
    old = aside.with_suffix(".old")
    try:
        write_json(aside / RECORD_NAME, {"name": record.name, **record.observed})
        write_json(aside / ENVIRONMENT_NAME, record.environment)
        versions = record.environment.get("software", {})
        heading = f"megatron_glue {record.name} on Python {versions.get('Python')}; the code itself is not below"
        write_text(aside / PACKAGES_NAME, to_requirements(record.packages, heading))
        write_text(aside / CONFIG_NAME, record.config_yaml)
        write_text(aside / LOSSES_NAME, _losses_csv(record.observed))
        if target.exists():
            target.replace(old)
        aside.replace(target)
    finally:
        if old.exists() and not target.exists():
            old.replace(target)
        for folder in (aside, old):
            shutil.rmtree(folder, ignore_errors=True)
    return target


def read_record(folder: Path, asked_by: str) -> Record:
    """Read a record.

    Args:
        folder: Its folder.
        asked_by: Flag or word that named it.

    Raises:
        ConfigError: If it is none, or a file of it is missing or damaged.
    """
    if not (folder / RECORD_NAME).is_file() and folder.is_dir():
        names = [record.name for record in list_records(folder)[0]]
        if names:
            raise ConfigError(asked_by, folder, "is an archive of records", f"name one of them: {', '.join(names)}")
    observed = read_observation(folder / RECORD_NAME, asked_by)
    try:
        return Record(
            str(observed.get("name", folder.name)),
            observed,
            json.loads((folder / ENVIRONMENT_NAME).read_text(encoding="utf-8")),
            read_requirements((folder / PACKAGES_NAME).read_text(encoding="utf-8")),
            (folder / CONFIG_NAME).read_text(encoding="utf-8"),
        )
    except (OSError, ValueError) as error:
        remedy = "make it again with tools/baseline.py record"
        raise ConfigError(asked_by, folder, f"is not whole ({error})", remedy) from error


def read_observation(file: Path, asked_by: str) -> dict[str, Any]:
    """Read what a run measured, of a record or saved alone.

    Args:
        file: The JSON file.
        asked_by: Flag or word that named it.

    Raises:
        ConfigError: If it cannot be read, or is something else.
    """
    remedy = "make one with tools/baseline.py record, or tools/ablate.py --save-baseline"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(asked_by, file, f"cannot be read ({error})", remedy) from error
    if not isinstance(content, dict) or not set(content) >= OBSERVED_KEYS:
        raise ConfigError(asked_by, file, "is no baseline", remedy)
    return content


def list_records(archive: Path) -> tuple[list[Record], list[str]]:
    """Read the records of an archive.

    Args:
        archive: Folder of one job's records.

    Returns:
        Those that are whole, oldest first, and a line for each that is not. What is still written aside is none yet.
    """
    found, damaged = [], []
    for file in sorted(archive.glob(f"[!.]*/{RECORD_NAME}")):
        try:
            found.append(read_record(file.parent, "DIR"))
        except ConfigError as error:
            damaged.append(f"{error.value}: {error.reason}")
    return sorted(found, key=lambda record: (str(record.environment.get("started")), record.name)), damaged


def _aside(archive: Path, name: str) -> Path:
    return archive / f".{name}.{os.getpid()}.tmp"


def _losses_csv(observed: Mapping[str, Any]) -> str:
    rows = enumerate(zip(observed["losses"], observed["grad_norms"], strict=True), start=1)
    return "".join(["step,loss,grad_norm\n", *(f"{step},{loss!r},{norm!r}\n" for step, (loss, norm) in rows)])
