"""What the reload state machine asks of a place where inputs wait for backward.

A tier copies bytes off the device and back, asynchronously, and orders copies and compute by fences. Host memory behind
a copy stream (``pinned_tier.py``) and a file behind worker threads (``disk_tier.py``) are tiers; both are driven by the
same ``double_buffer.py``. A tier does not know blocks, micro-batches, or which input is wanted next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Fence = Any
"""A point in the order of one queue of work, which other work can be put after. Each tier has its own kind."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """One copy that was issued.

    Attributes:
        started: Reached when the copy begins.
        done: Reached when the destination holds the bytes and the source is no longer read.
    """

    started: Fence
    done: Fence


@dataclass(frozen=True, eq=False)
class StoredInput:
    """One tensor that left the device.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        num_bytes: Its size.
        place: Where the tier put it; only the tier reads this.
        transfer: The copy off the device.
    """

    shape: torch.Size
    dtype: torch.dtype
    num_bytes: int
    place: Any
    transfer: Transfer

    def view(self, buffer: Tensor) -> Tensor:
        """Read the first bytes of a uint8 buffer as a contiguous tensor of this shape and dtype, without a copy."""
        return buffer[: self.num_bytes].view(self.dtype).view(self.shape)


class Tier(ABC):
    """The contract. All methods are called by one thread at a time, and none waits on the host unless it says so."""

    @abstractmethod
    def store(self, x: Tensor) -> StoredInput:
        """Start copying ``x`` away, after everything issued so far on the compute queue.

        The tier holds ``x`` until it is safe to reuse its memory, and only a small number of inputs at a time: when
        too many are under way, compute waits. ``x`` must not be written to before then.

        Raises:
            OSError: The place is full or cannot be written, now or in an earlier copy.
        """

    @abstractmethod
    def allocate(self, num_bytes: int) -> Tensor:
        """Return a device buffer, uint8 [at least num_bytes], that loads may fill once ``mark()`` is reached."""

    @abstractmethod
    def load(self, stored: StoredInput, buffer: Tensor, after: Fence) -> Transfer:
        """Start copying ``stored`` into ``buffer``, once its copy off the device is done and ``after`` is reached."""

    @abstractmethod
    def mark(self) -> Fence:
        """Return a fence behind everything issued so far on the compute queue."""

    @abstractmethod
    def wait(self, fence: Fence, buffer: Tensor) -> None:
        """Put everything issued to the compute queue from now on behind ``fence``.

        Args:
            fence: End of a load.
            buffer: What it fills. Its memory, if freed, is not given to anyone before the compute queue is through
                with what it was issued until then.

        Raises:
            OSError: The copy behind the fence failed.
        """

    @abstractmethod
    def discard(self, stored: StoredInput, loaded: Fence | None) -> None:
        """Give the place of ``stored`` back.

        Args:
            stored: An input that will not be loaded again.
            loaded: End of the last load from it, if there was one.
        """

    @abstractmethod
    def settle(self) -> None:
        """Let go of the inputs of all copies issued so far, without raising: what failed is forgotten."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until compute and all copies issued so far have ended, without raising."""

    @abstractmethod
    def begin_step(self) -> None:
        """Nothing is stored now: put the room for inputs in order. May wait on the host for copies."""

    @abstractmethod
    def elapsed_ms(self, begin: Fence, end: Fence) -> float:
        """Milliseconds from one fence to another. Waits on the host until both are reached."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all copies and free everything. Idempotent."""

    @abstractmethod
    def describe(self) -> str:
        """Say in a few words where inputs go."""

    @property
    @abstractmethod
    def requested_bytes(self) -> int:
        """Most bytes of inputs that were away at one time."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes that the tier occupies for them (host memory or file)."""
