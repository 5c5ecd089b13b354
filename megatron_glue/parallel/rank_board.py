"""A board on which ranks leave short notes, over the store that they met through: no collective, no tensor.

For what must work when collectives do not. The store may be held by the very process that hangs, and then its calls
never return: whoever must not hang himself goes through :func:`run_bounded`, with a connection of his own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

T = TypeVar("T")


class RankBoard:
    """One connection to the board.

    Args:
        store: Any store that all ranks reach.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._origin = store
        self._store = dist.PrefixStore("watchdog", store)  # pyright: ignore[reportPrivateImportUsage]

    @classmethod
    def of_run(cls, rank: int, world_size: int) -> RankBoard | None:
        """The board of this process' group; ``None`` without one."""
        if not dist.is_initialized() or world_size == 1:
            return None
        return cls(distributed_c10d._get_default_store(), rank, world_size)

    def connect(self) -> RankBoard:
        """The same board over a connection of its own, which no other thread's call can block."""
        return RankBoard(self._origin.clone(), self.rank, self.world_size)

    def leave(self, kind: str, text: str) -> None:
        """Leave this rank's note of a kind, over an earlier one."""
        self._store.set(f"{kind}/{self.rank}", text)

    def note_of(self, kind: str, rank: int) -> str | None:
        """A rank's note; ``None`` if it left none."""
        key = f"{kind}/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def notes(self, kind: str) -> dict[int, str]:
        """Notes by rank, of those that left one."""
        found = {rank: self.note_of(kind, rank) for rank in range(self.world_size)}
        return {rank: note for rank, note in found.items() if note is not None}

    def add(self, name: str, amount: int = 1) -> int:
        """Add to a number that all ranks share, 0 at first, and return what it is now."""
        return self._store.add(name, amount)


def run_bounded(call: Callable[[], T], timeout_s: float) -> T | None:
    """Call something that may never return.

    Args:
        call: Runs in a thread of its own, which is left behind if it takes too long.
        timeout_s: Longest wait.

    Returns:
        Its result; ``None`` if it took too long or failed.
    """
    results: list[T] = []

    def work() -> None:
        # A lost connection is a plain RuntimeError; there is nobody here to tell.
        try:
            results.append(call())
        except (RuntimeError, ValueError, OSError):
            return

    thread = threading.Thread(target=work, name="watchdog-call", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return results[0] if results else None
