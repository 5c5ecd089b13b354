"""What ``tools/preflight.py`` measures on the ranks of a job: clocks, links, storage, limits.

Functions with a process group are collective. Rates are in MiB per second; a rank on its own has no link to measure.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_glue.parallel.collectives import gather_rows

MIB = 1 << 20
_CLOCK_ROUNDS = 7
_TRANSFER_ROUNDS = 4
_BLOCK_BYTES = 4 * MIB


def clock_offsets_ms(group: ProcessGroup | None) -> list[float]:
    """Compare the clocks of all ranks with that of the first.

    Ranks leave a barrier at nearly the same time; of several rounds the one in which a rank was nearest counts.

    Args:
        group: The ranks.

    Returns:
        By rank, milliseconds that its clock is ahead of the first rank's.
    """
    if group is None:
        return [0.0]
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        dist.all_reduce(torch.zeros(1), group=group)
        now_ns = torch.tensor([time.time_ns()], dtype=torch.int64)
        times_ns = [int(of_rank[0]) for of_rank in gather_rows(now_ns, group)]
        rounds.append([(of_rank - times_ns[0]) / 1e6 for of_rank in times_ns])
    return [min(offsets, key=abs) for offsets in zip(*rounds, strict=True)]


def ring_rate(num_bytes: int, device: torch.device, group: ProcessGroup | None) -> float | None:
    """Send to the next rank while receiving from the one before.

    Args:
        num_bytes: Size of one message.
        device: Where it lies.
        group: The ranks.

    Returns:
        Rate at which this rank received; ``None`` without a neighbour.
    """
    if group is None or group.size() == 1:
        return None
    rank, num_ranks = dist.get_rank(group), group.size()
    sent, received = _buffer(num_bytes, device), _buffer(num_bytes, device)
    seconds = []
    for _ in range(_TRANSFER_ROUNDS):
        dist.all_reduce(torch.zeros(1), group=group)
        start = time.perf_counter()
        transfers = [
            dist.P2POp(dist.isend, sent, (rank + 1) % num_ranks, group),
            dist.P2POp(dist.irecv, received, (rank - 1) % num_ranks, group),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        _await(device)
        seconds.append(time.perf_counter() - start)
    return num_bytes / MIB / statistics.median(seconds[1:])


def all_reduce_rate(num_bytes: int, device: torch.device, group: ProcessGroup | None) -> float | None:
    """All-reduce a buffer.

    Args:
        num_bytes: Its size.
        device: Where it lies.
        group: The ranks.

    Returns:
        What each rank's link carried, 2 (n - 1) / n of the buffer, over the time; ``None`` for a rank on its own.
    """
    if group is None or group.size() == 1:
        return None
    buffer, seconds = _buffer(num_bytes, device), []
    for _ in range(_TRANSFER_ROUNDS):
        _await(device)
        start = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        _await(device)
        seconds.append(time.perf_counter() - start)
    return 2 * (group.size() - 1) / group.size() * num_bytes / MIB / statistics.median(seconds[1:])


def storage_rates(folder: Path, num_bytes: int) -> tuple[float, float]:
    """Write a file to the disk itself and read it back from there; the file is removed.

    Args:
        folder: Where; it must exist.
        num_bytes: Size of the file.

    Returns:
        Write and read rate. On a file system that ignores the request to drop its cache the second is the cache's.

    Raises:
        OSError: If the folder cannot be written or is full.
    """
    block = os.urandom(_BLOCK_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight-") as file:
        start = time.perf_counter()
        for offset in range(0, num_bytes, _BLOCK_BYTES):
            file.write(block[: num_bytes - offset])
        file.flush()
        os.fsync(file.fileno())
        write_seconds = time.perf_counter() - start
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(_BLOCK_BYTES):
            pass
        read_seconds = time.perf_counter() - start
    return num_bytes / MIB / write_seconds, num_bytes / MIB / read_seconds


def free_bytes(folder: Path) -> int:
    """Free space of the file system that a folder, or its nearest existing parent, lies on.

    Raises:
        OSError: If it cannot be asked.
    """
    return shutil.disk_usage(existing_folder(folder)).free


def existing_folder(folder: Path) -> Path:
    """The folder, or the nearest of its parents that exists."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def open_file_limit() -> int:
    """Files that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _buffer(num_bytes: int, device: torch.device) -> Tensor:
    return torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)


def _await(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
