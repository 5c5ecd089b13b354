"""One file on disk that inputs are written to and read from, at offsets that the disk tier chooses.

The file has no name after it was opened, so nothing can be left behind by a killed run except a name that was created a
moment before; such leftovers of this machine are removed when the next file is opened. Where the filesystem allows it,
reads and writes bypass the page cache (O_DIRECT): the page cache would keep the inputs in memory, which offloading is
meant to free, and its copies cost processor time that compute needs.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from megatron_glue.activation.extents import ALIGNMENT_BYTES

FILE_PREFIX = "megatron-glue-offload"
MOUNTS = Path("/proc/self/mounts")


def allocate_pages(num_bytes: int) -> mmap.mmap:
    """Return zeroed private memory of exactly ``num_bytes``, aligned to a page, outside the C allocator's pools."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def lies_in_memory(folder: Path) -> bool:
    """Whether a folder's filesystem is a RAM disk (tmpfs, ramfs). Linux tells; elsewhere the answer is no."""
    try:
        lines = MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return False
    # The last filesystem mounted at a place hides those before it.
    kinds = {point.replace("\\040", " "): kind for _, point, kind, *_ in map(str.split, lines)}
    folder = folder.resolve()
    nearest = next((str(place) for place in (folder, *folder.parents) if str(place) in kinds), "")
    return kinds.get(nearest) in ("tmpfs", "ramfs")


class OffloadFile:
    """An unnamed file in a folder.

    Args:
        folder: Created if it does not exist.

    Attributes:
        direct: Whether reads and writes bypass the page cache.
        num_bytes: Bytes reserved on disk.

    Raises:
        OSError: The folder cannot be created or written to. Its ``strerror`` is the bare reason.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_bytes = 0
        self.direct = False
        self._descriptor = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open_unnamed()
            self.direct = self._bypass_page_cache()
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(folder)) from error

    def reserve(self, num_bytes: int) -> None:
        """Make the file ``num_bytes`` long, taking the room from the disk now rather than in a later write.

        Raises:
            OSError: No room left.
        """
        try:
            os.posix_fallocate(self._descriptor, self.num_bytes, num_bytes - self.num_bytes)
        except OSError as error:
            # Some network filesystems cannot reserve; there a full disk shows when it is written to.
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise self._explain(error) from error
        self.num_bytes = num_bytes

    def write(self, source: np.ndarray, offset: int) -> None:
        """Write all of ``source`` (uint8; aligned in address and length) at an aligned offset, blocking.

        Raises:
            OSError: The disk is full or failed.
        """
        self._transfer(os.pwritev, source, offset)

    def read(self, destination: np.ndarray, offset: int) -> None:
        """Fill ``destination`` (uint8; aligned in address and length) from an aligned offset, blocking.

        Raises:
            OSError: The disk failed.
        """
        self._transfer(os.preadv, destination, offset)

    def close(self) -> None:
        """Close the file, which frees its room on disk. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _transfer(self, operation: Any, array: np.ndarray, offset: int) -> None:
        position = 0
        try:
            while position < array.nbytes:
                moved = operation(self._descriptor, [array[position:]], offset + position)
                if moved == 0:
                    raise OSError(errno.EIO, "the file ended early")
                # A short transfer may stop inside a sector; go back to where an aligned one can continue.
                position += moved if position + moved == array.nbytes else moved - moved % ALIGNMENT_BYTES
        except OSError as error:
            raise self._explain(error) from error

    def _open_unnamed(self) -> int:
        prefix = f"{FILE_PREFIX}-{socket.gethostname()}-"
        for leftover in self.folder.glob(f"{prefix}*"):
            # A name matters to nobody once its file is open, so removing that of a live run does no harm.
            leftover.unlink(missing_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=prefix, dir=self.folder)
        Path(name).unlink(missing_ok=True)
        return descriptor

    def _bypass_page_cache(self) -> bool:
        """Switch to O_DIRECT and prove that it works: some filesystems refuse only the first transfer."""
        direct_flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | direct_flag)
            page = allocate_pages(ALIGNMENT_BYTES)
            os.pwritev(self._descriptor, [page], 0)
            os.preadv(self._descriptor, [page], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            return False
        return direct_flag != 0

    def _explain(self, error: OSError) -> OSError:
        reason = error.strerror or str(error)
        return OSError(
            error.errno,
            f"activations cannot be offloaded to this folder ({reason}); make room, or choose another offload folder",
            str(self.folder),
        )
