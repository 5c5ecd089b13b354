"""Which stored input backward will most likely ask for next.

Backward walks the blocks of one micro-batch in reverse; micro-batches come in the order of their forward passes. The
guess may be wrong (a block without gradient, another schedule): that costs a copy, never a wrong value.
"""

from __future__ import annotations

from megatron_glue.activation.tiers import StoredInput


class InputOrder:
    """The stored inputs of each micro-batch in flight, in forward order."""

    def __init__(self) -> None:
        self._chains: dict[int, list[StoredInput]] = {}

    def append(self, micro_batch: int, stored: StoredInput) -> None:
        """Add the newest input of a micro-batch."""
        self._chains.setdefault(micro_batch, []).append(stored)

    def remove(self, micro_batch: int, stored: StoredInput) -> None:
        """Take an input out, whether or not it was the last."""
        chain = self._chains[micro_batch]
        chain.remove(stored)
        if not chain:
            del self._chains[micro_batch]

    def count(self, micro_batch: int) -> int:
        """Stored inputs of a micro-batch."""
        return len(self._chains.get(micro_batch, ()))

    def has_others(self, micro_batch: int) -> bool:
        """Whether inputs of other micro-batches are stored."""
        return any(key != micro_batch for key in self._chains)

    def first(self) -> StoredInput | None:
        """The last block of the oldest micro-batch in flight."""
        return next((chain[-1] for chain in self._chains.values()), None)

    def after(self, micro_batch: int, stored: StoredInput) -> StoredInput | None:
        """What follows in backward: the block before ``stored``, else the last one of the oldest other micro-batch."""
        chain = self._chains[micro_batch]
        position = chain.index(stored)
        if position > 0:
            return chain[position - 1]
        return next((other[-1] for key, other in self._chains.items() if key != micro_batch), None)

    def pop_all(self) -> list[StoredInput]:
        """Take everything out."""
        everything = [stored for chain in self._chains.values() for stored in chain]
        self._chains.clear()
        return everything

    def __len__(self) -> int:
        return sum(len(chain) for chain in self._chains.values())
