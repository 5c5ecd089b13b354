"""Inputs wait for backward in a file: the tier of machines without an accelerator.

The "device" is the process's own memory. A writer thread empties it while the next blocks run forward, a reader thread
fills the reload buffers while blocks run backward. Both block in the kernel without holding the interpreter lock, so
copies and compute really overlap. It does not choose what is loaded when: ``double_buffer.py`` does.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_glue.activation.extents import Extent, ExtentList, round_up
from megatron_glue.activation.offload_file import OffloadFile, allocate_pages, lies_in_memory
from megatron_glue.activation.tiers import StoredInput, Tier, Transfer
from megatron_glue.activation.worker import HostFence, Worker

logger = logging.getLogger(__name__)

STAGING_BYTES = 4 << 20
"""Written at a time. Tensors are not aligned as O_DIRECT asks, so their bytes pass through one buffer of this size."""

MAX_PENDING_WRITES = 2
"""Inputs that may still be in memory behind the block that runs: one being written, one queued."""


class DiskTier(Tier):
    """A file and two threads.

    Args:
        folder: Where the file is created. One in memory (tmpfs) frees nothing; the log then says so.
        max_inflight: 2 for a thread each way, 1 for one thread that reads and writes in turn.
        max_bytes_per_s: A copy lasts at least as long as this rate asks; its thread sleeps for the rest. 0: no bound.

    Raises:
        OSError: The folder cannot be written to.
    """

    def __init__(self, folder: Path, *, max_inflight: int = 2, max_bytes_per_s: float = 0.0) -> None:
        self._max_bytes_per_s = max_bytes_per_s
        self._file = OffloadFile(folder)
        if lies_in_memory(folder):
            logger.warning(
                "activation offload: %s is a RAM disk, so nothing is freed; choose a folder on a disk "
                "(--activation-offload-dir)",
                folder,
            )
        self._extents = ExtentList()
        self._staging = np.frombuffer(allocate_pages(STAGING_BYTES), dtype=np.uint8)
        self._pending: deque[HostFence] = deque()
        self._away_bytes = 0
        self._requested_bytes = 0
        self._writer = Worker("activation-offload")
        self._reader = Worker("activation-reload") if max_inflight > 1 else self._writer

    def store(self, x: Tensor) -> StoredInput:
        """Queue the write; blocks while too many inputs are still in memory."""
        while self._pending and (len(self._pending) >= MAX_PENDING_WRITES or self._pending[0].is_reached):
            self._pending.popleft().wait()
        num_bytes = x.numel() * x.element_size()
        extent = self._extents.take(num_bytes)
        if extent is None:
            new_size = self._extents.grow_for(num_bytes)
            self._file.reserve(new_size)
            self._extents.grow(new_size)
            extent = self._extents.take(num_bytes)
        assert extent is not None, "the file just grew by this much"
        self._away_bytes += num_bytes
        self._requested_bytes = max(self._requested_bytes, self._away_bytes)
        content = x.detach().reshape(-1).view(torch.uint8).numpy()
        transfer = Transfer(*self._writer.submit(partial(self._write, content, extent)))
        self._pending.append(transfer.done)
        return StoredInput(x.shape, x.dtype, num_bytes, extent, transfer)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return page-aligned memory, as O_DIRECT asks."""
        return torch.frombuffer(allocate_pages(round_up(num_bytes)), dtype=torch.uint8)

    def load(self, stored: StoredInput, buffer: Tensor, after: HostFence) -> Transfer:
        """Queue the read."""
        destination = buffer[: stored.place.num_bytes].numpy()
        return Transfer(
            *self._reader.submit(partial(self._read, destination, stored.place), after=(stored.transfer.done, after))
        )

    def mark(self) -> HostFence:
        """Compute on a CPU is done when it was called, so the fence is reached already."""
        return HostFence.now()

    def wait(self, fence: HostFence, buffer: Tensor) -> None:
        """Block the calling thread."""
        fence.wait()

    def discard(self, stored: StoredInput, loaded: HostFence | None) -> None:
        """Free the extent. A later write to it is queued behind the write that may still be under way."""
        if loaded is not None:
            loaded.settle()
        self._away_bytes -= stored.num_bytes
        self._extents.give_back(stored.place)

    def settle(self) -> None:
        """Block until nothing is being written."""
        while self._pending:
            self._pending.popleft().settle()

    def synchronize(self) -> None:
        """Block until both threads are idle; compute has ended when it was called."""
        self._writer.drain()
        self._reader.drain()

    def begin_step(self) -> None:
        """The file keeps its size."""

    def elapsed_ms(self, begin: HostFence, end: HostFence) -> float:
        """Difference on the host's clock."""
        return (end.time_s - begin.time_s) * 1e3

    def close(self) -> None:
        """End both threads and free the file."""
        self._writer.close()
        self._reader.close()
        self._file.close()

    def describe(self) -> str:
        """Name the folder and the kind of I/O."""
        kind = "direct I/O" if self._file.direct else "buffered I/O: this filesystem has no direct I/O"
        bound = f", at most {self._max_bytes_per_s / 2**20:g} MiB/s each way" if self._max_bytes_per_s else ""
        turns = ", one copy at a time" if self._reader is self._writer else ""
        return f"disk {self._file.folder} ({kind}{bound}{turns})"

    @property
    def requested_bytes(self) -> int:
        """Most bytes of inputs that were away at one time."""
        return self._requested_bytes

    @property
    def held_bytes(self) -> int:
        """Size of the file."""
        return self._file.num_bytes

    def _read(self, destination: np.ndarray, extent: Extent) -> None:
        """Reader thread."""
        begin_s = time.perf_counter()
        self._file.read(destination, extent.begin)
        self._keep_rate(destination.nbytes, begin_s)

    def _write(self, content: np.ndarray, extent: Extent) -> None:
        """Writer thread. NumPy copies, since a torch copy would start a second team of compute threads here."""
        begin_s = time.perf_counter()
        for begin in range(0, content.nbytes, STAGING_BYTES):
            piece = content[begin : begin + STAGING_BYTES]
            self._staging[: piece.nbytes] = piece
            self._file.write(self._staging[: round_up(piece.nbytes)], extent.begin + begin)
        self._keep_rate(content.nbytes, begin_s)

    def _keep_rate(self, num_bytes: int, begin_s: float) -> None:
        if self._max_bytes_per_s:
            time.sleep(max(0.0, begin_s + num_bytes / self._max_bytes_per_s - time.perf_counter()))
