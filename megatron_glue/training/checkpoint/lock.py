"""One run per folder: who writes there holds a lock, which ends with its process, however that ends.

Two runs in one folder would remove each other's unpublished checkpoints and prune each other's published ones. Who only
reads (``tools/checkpoint.py``, ``--load``) takes no lock. The lock is a file beside the checkpoints and part of none.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from pathlib import Path

LOCK_NAME = ".lock"
_WAIT_S = 5.0
"""A rank of a launcher that was just killed may need a moment to notice."""
_POLL_S = 0.1

logger = logging.getLogger(__name__)


class FolderTakenError(RuntimeError):
    """Another run writes into the folder."""


class FolderLock:
    """The right to write into a folder.

    Args:
        folder: The folder; it need not exist before :meth:`acquire`.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        self._handle: int | None = None

    def acquire(self, wait_seconds: float = _WAIT_S) -> None:
        """Take the lock. A filesystem that knows no locks is told in a warning, and nothing is held.

        Args:
            wait_seconds: How long another holder is waited for.

        Raises:
            FolderTakenError: If it holds on.
            OSError: If the lock's file cannot be made.
        """
        assert self._handle is None, "one lock at a time"
        deadline = time.monotonic() + wait_seconds
        while not self._try():
            if time.monotonic() >= deadline:
                raise FolderTakenError(str(self._path.parent))
            time.sleep(_POLL_S)

    def release(self) -> None:
        """Let go and remove the file. Nothing happens if the lock is not held."""
        if self._handle is None:
            return
        # Removed while it is held: whoever waits for it sees that its file is no longer the folder's (_is_current).
        if self._is_current(self._handle):
            self._path.unlink(missing_ok=True)
        os.close(self._handle)
        self._handle = None

    def _try(self) -> bool:
        """Whether nobody has to be waited for any more."""
        handle = self._open()
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            # Network filesystems may know no locks (ENOLCK, ENOTSUP, ENOSYS); runs there had none before.
            logger.warning(
                "%s: this filesystem knows no locks (%s); see to it that no second run writes there",
                self._path.parent,
                error.strerror,
            )
            return True
        if not self._is_current(handle):
            os.close(handle)
            return False
        self._handle = handle
        return True

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:
            # Another user's killed run may have left it in a folder that both may write to.
            return os.open(self._path, os.O_RDONLY)

    def _is_current(self, handle: int) -> bool:
        """Whether an open file is the one that the lock's name leads to now."""
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self._path))
        except FileNotFoundError:
            return False
