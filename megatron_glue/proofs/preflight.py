"""Whether machines are fit for a run: what ``tools/preflight.py`` asks of every rank, and how it judges the answers.

Every rank measures, what one machine has in common its first rank alone. Answers are gathered and judged on all ranks
alike. A measurement that cannot be made is a failed check with its reason, never an error that leaves ranks waiting.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_glue.activation.device_api import device_name
from megatron_glue.config.environment import RankEnvironment
from megatron_glue.parallel.agreement import gather_texts
from megatron_glue.proofs import preflight_measures as measures
from megatron_glue.training.run_environment import software
from megatron_glue.training.start_check import comparable, first_difference

FILES_PER_RANK = 20
"""Groups of a mesh that may connect to every other rank."""
SPARE_FILES = 1024
SHM = Path("/dev/shm")  # noqa: S108 (asked for its size, nothing is written)


@dataclass(frozen=True)
class Needs:
    """What the machines must have. 0: report, do not judge.

    Attributes:
        folder: Where checkpoints go.
        offload_folder: Where activations go without an accelerator; ``None``: nowhere.
        checkpoint_mb_per_s: Rate at which one machine must write and read checkpoints, in MiB/s.
        offload_mb_per_s: Rate at which it must write and read activations, in MiB/s.
        free_mb: Free space for checkpoints, in MiB.
        clock_skew_ms: Largest difference of two clocks.
        link_mb_per_s: Least rate between neighbouring ranks.
        all_reduce_mb_per_s: Least rate of an all-reduce.
        shm_mb: Free shared memory of a machine.
        message_mb: Size of messages.
        file_mb: Size of files.
    """

    folder: Path
    offload_folder: Path | None = None
    checkpoint_mb_per_s: float = 0.0
    offload_mb_per_s: float = 0.0
    free_mb: float = 0.0
    clock_skew_ms: float = 500.0
    link_mb_per_s: float = 0.0
    all_reduce_mb_per_s: float = 0.0
    shm_mb: float = 1024.0
    message_mb: int = 64
    file_mb: int = 256


@dataclass(frozen=True)
class Check:
    """One judged measurement.

    Attributes:
        name: What was looked at.
        is_ok: ``None`` if there was nothing to measure, or nothing is asked of it.
        found: What was found, with the worst place.
        needed: What is needed; empty if nothing is.
    """

    name: str
    is_ok: bool | None
    found: str
    needed: str = ""


@dataclass
class Answers:
    """What one rank measured; numbers that it has no part in are missing.

    Attributes:
        host: Its machine.
        is_first: Whether it speaks for the machine.
        versions: Of software and device.
        numbers: By name.
        failures: Name -> why there is no number.
    """

    host: str
    is_first: bool
    versions: dict[str, str]
    numbers: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def preflight(
    needs: Needs, environment: RankEnvironment, device: torch.device, group: ProcessGroup | None
) -> list[Check]:
    """Measure and judge; collective.

    Args:
        needs: What the machines must have.
        environment: Who this process is.
        device: Where it computes.
        group: All ranks; ``None`` for one process.

    Returns:
        The checks, the same on all ranks.
    """
    versions = {**comparable(software()), "device": device_name(device)}
    own = Answers(socket.gethostname(), environment.local_rank == 0, versions)
    offsets_ms = measures.clock_offsets_ms(group)
    for name, rate in (
        ("link", measures.ring_rate(needs.message_mb * measures.MIB, device, group)),
        ("all-reduce", measures.all_reduce_rate(needs.message_mb * measures.MIB, device, group)),
    ):
        if rate is not None:
            own.numbers[name] = rate
    own.numbers["open files"] = measures.open_file_limit()
    if own.is_first:
        _measure_machine(own, needs)
    answers = [Answers(**json.loads(text)) for text in gather_texts(json.dumps(asdict(own)), group)]
    return list(judge(answers, offsets_ms, needs))


def judge(answers: list[Answers], offsets_ms: list[float], needs: Needs) -> Iterator[Check]:
    """Hold all ranks' answers to the needs.

    Args:
        answers: By rank.
        offsets_ms: By rank, how far its clock is ahead of the first rank's.
        needs: What the machines must have.
    """
    tables = [{**answer.versions, "host": answer.host} for answer in answers]
    is_mixed = any(answer.versions != answers[0].versions for answer in answers)
    found = first_difference(tables) if is_mixed else f"{len(answers)} rank(s) alike"
    yield Check("versions", not is_mixed, found, "all alike")
    skew_ms = max(offsets_ms) - min(offsets_ms)
    farthest = max(range(len(offsets_ms)), key=lambda rank: abs(offsets_ms[rank]))
    yield Check(
        "clock skew",
        skew_ms <= needs.clock_skew_ms if len(answers) > 1 else None,
        f"{skew_ms:.1f} ms (rank {farthest} on {answers[farthest].host})",
        f"at most {needs.clock_skew_ms:g} ms",
    )
    num_files = max(4096, FILES_PER_RANK * len(answers) + SPARE_FILES)
    for name, unit, least in (
        ("link", "MiB/s", needs.link_mb_per_s),
        ("all-reduce", "MiB/s", needs.all_reduce_mb_per_s),
        ("checkpoint write", "MiB/s", needs.checkpoint_mb_per_s),
        ("checkpoint read", "MiB/s", needs.checkpoint_mb_per_s),
        ("free space", "MiB", needs.free_mb),
        ("offload write", "MiB/s", needs.offload_mb_per_s),
        ("offload read", "MiB/s", needs.offload_mb_per_s),
        ("shared memory", "MiB", needs.shm_mb),
        ("open files", "", num_files),
    ):
        yield _least(answers, name, unit, least)


def _least(answers: list[Answers], name: str, unit: str, least: float) -> Check:
    """Judge the smallest of the ranks' numbers."""
    needed = f"at least {least:,.0f} {unit}".rstrip() if least else ""
    for rank, answer in enumerate(answers):
        if name in answer.failures:
            return Check(name, False, f"rank {rank} on {answer.host}: {answer.failures[name]}", needed)
    numbers = {rank: answer.numbers[name] for rank, answer in enumerate(answers) if name in answer.numbers}
    if not numbers:
        return Check(name, None, "nothing to measure", needed)
    worst = min(numbers, key=lambda rank: numbers[rank])
    found = f"{numbers[worst]:,.0f} {unit}".rstrip()
    if len(numbers) > 1:
        found += f" (rank {worst} on {answers[worst].host}, the least of {len(numbers)})"
    return Check(name, numbers[worst] >= least if least else None, found, needed)


def _measure_machine(own: Answers, needs: Needs) -> None:
    """What the ranks of one machine have in common."""
    places: list[tuple[str, Path]] = [("checkpoint", needs.folder)]
    if needs.offload_folder is not None:
        places.append(("offload", needs.offload_folder))
    for name, folder in places:
        try:
            rates = measures.storage_rates(measures.existing_folder(folder), needs.file_mb * measures.MIB)
            own.numbers[f"{name} write"], own.numbers[f"{name} read"] = rates
        except OSError as error:
            own.failures[f"{name} write"] = f"{folder}: {error.strerror or error}"
    for name, folder in (("free space", needs.folder), ("shared memory", SHM)):
        try:
            own.numbers[name] = measures.free_bytes(folder) / measures.MIB
        except OSError as error:
            own.failures[name] = f"{folder}: {error.strerror or error}"


def is_fit(checks: list[Check]) -> bool:
    """Whether no check failed."""
    return all(check.is_ok is not False for check in checks)


def as_record(checks: list[Check], answers: int) -> dict[str, Any]:
    """What ``--json`` writes.

    Args:
        checks: All of them.
        answers: Number of ranks.
    """
    rows = [{"name": c.name, "ok": c.is_ok, "found": c.found, "needed": c.needed} for c in checks]
    return {"ok": is_fit(checks), "ranks": answers, "checks": rows}
