"""A tier around another tier: everything is passed on, subclasses change what they are about.

It adds nothing of its own and holds no memory.
"""

from __future__ import annotations

from torch import Tensor

from megatron_glue.activation.tiers import Fence, StoredInput, Tier, Transfer


class WrappedTier(Tier):
    """Passes every call on.

    Args:
        tier: Does the work.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def store(self, x: Tensor) -> StoredInput:
        """See the wrapped tier."""
        return self._tier.store(x)

    def allocate(self, num_bytes: int) -> Tensor:
        """See the wrapped tier."""
        return self._tier.allocate(num_bytes)

    def load(self, stored: StoredInput, buffer: Tensor, after: Fence) -> Transfer:
        """See the wrapped tier."""
        return self._tier.load(stored, buffer, after)

    def mark(self) -> Fence:
        """See the wrapped tier."""
        return self._tier.mark()

    def wait(self, fence: Fence, buffer: Tensor) -> None:
        """See the wrapped tier."""
        self._tier.wait(fence, buffer)

    def discard(self, stored: StoredInput, loaded: Fence | None) -> None:
        """See the wrapped tier."""
        self._tier.discard(stored, loaded)

    def settle(self) -> None:
        """See the wrapped tier."""
        self._tier.settle()

    def synchronize(self) -> None:
        """See the wrapped tier."""
        self._tier.synchronize()

    def begin_step(self) -> None:
        """See the wrapped tier."""
        self._tier.begin_step()

    def elapsed_ms(self, begin: Fence, end: Fence) -> float:
        """See the wrapped tier."""
        return self._tier.elapsed_ms(begin, end)

    def close(self) -> None:
        """See the wrapped tier."""
        self._tier.close()

    def describe(self) -> str:
        """See the wrapped tier."""
        return self._tier.describe()

    @property
    def requested_bytes(self) -> int:
        """See the wrapped tier."""
        return self._tier.requested_bytes

    @property
    def held_bytes(self) -> int:
        """See the wrapped tier."""
        return self._tier.held_bytes
