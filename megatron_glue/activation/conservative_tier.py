"""A tier that waits for everything, everywhere: for telling whether a wrong value comes from a race.

Wraps any tier. Before and after each hand-over of memory between compute and a copy the host waits until compute and
copies have come to rest, so no fence of the wrapped tier is needed for the right result. If a run differs with and
without it, a fence is missing or memory is used too early; if it does not, look elsewhere. Nothing overlaps under it.
It changes when work runs, never what is copied where.
"""

from __future__ import annotations

from torch import Tensor

from megatron_glue.activation.tiers import Fence, StoredInput, Transfer
from megatron_glue.activation.wrapped_tier import WrappedTier


class ConservativeTier(WrappedTier):
    """The wrapped tier with a full synchronisation at every hand-over."""

    def store(self, x: Tensor) -> StoredInput:
        """Wait for compute, copy ``x`` away, wait for the copy."""
        self._tier.synchronize()
        stored = self._tier.store(x)
        self._tier.synchronize()
        return stored

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a buffer whose memory nobody uses any more."""
        buffer = self._tier.allocate(num_bytes)
        self._tier.synchronize()
        return buffer

    def load(self, stored: StoredInput, buffer: Tensor, after: Fence) -> Transfer:
        """Wait for the last reader of the buffer, copy, wait for the copy."""
        self._tier.synchronize()
        transfer = self._tier.load(stored, buffer, after)
        self._tier.synchronize()
        return transfer

    def wait(self, fence: Fence, buffer: Tensor) -> None:
        """Wait on the host too."""
        self._tier.wait(fence, buffer)
        self._tier.synchronize()

    def discard(self, stored: StoredInput, loaded: Fence | None) -> None:
        """Give the place back when nothing reads or writes it."""
        self._tier.synchronize()
        self._tier.discard(stored, loaded)

    def settle(self) -> None:
        """Let go of the inputs of all copies, which have ended."""
        self._tier.settle()
        self._tier.synchronize()

    def describe(self) -> str:
        """Say that nothing overlaps."""
        return f"{self._tier.describe()} (a full synchronisation at every hand-over, nothing overlaps)"
