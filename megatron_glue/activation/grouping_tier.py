"""Several stored tensors that come back together, as one input of the reload buffers.

What a block's modules keep for backward leaves piece by piece while the block runs, and is wanted all at once when its
backward begins. A group is a stored input whose place is a list of stored pieces; loading it loads them one by one into
one buffer. So the buffers, their states and their order need not know of pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_glue.activation.extents import round_up
from megatron_glue.activation.tiers import Fence, StoredInput, Transfer
from megatron_glue.activation.wrapped_tier import WrappedTier


@dataclass(frozen=True)
class GroupPlace:
    """Where the pieces of a group are: each with the byte of the buffer where it begins, a multiple of the page."""

    pieces: tuple[tuple[StoredInput, int], ...]


def group(pieces: Sequence[StoredInput]) -> StoredInput:
    """Make one stored input of several, at least one, in the order in which they were stored.

    Returns:
        uint8 [sum of the pieces' sizes, each rounded up to the page].
    """
    placed: list[tuple[StoredInput, int]] = []
    num_bytes = 0
    for piece in pieces:
        placed.append((piece, num_bytes))
        num_bytes += round_up(piece.num_bytes)
    transfer = Transfer(pieces[0].transfer.started, pieces[-1].transfer.done)
    return StoredInput(torch.Size([num_bytes]), torch.uint8, num_bytes, GroupPlace(tuple(placed)), transfer)


class GroupingTier(WrappedTier):
    """Loads and discards groups piece by piece; other inputs as the wrapped tier does."""

    def load(self, stored: StoredInput, buffer: Tensor, after: Fence) -> Transfer:
        """Load all pieces. Each waits for the one before it, so the end of the last tells of an error in any."""
        if not isinstance(stored.place, GroupPlace):
            return self._tier.load(stored, buffer, after)
        transfers: list[Transfer] = []
        for piece, begin in stored.place.pieces:
            room = buffer[begin : begin + round_up(piece.num_bytes)]
            transfers.append(self._tier.load(piece, room, transfers[-1].done if transfers else after))
        return Transfer(transfers[0].started, transfers[-1].done)

    def discard(self, stored: StoredInput, loaded: Fence | None) -> None:
        """Give the places of all pieces back."""
        if not isinstance(stored.place, GroupPlace):
            self._tier.discard(stored, loaded)
            return
        for piece, _ in stored.place.pieces:
            self._tier.discard(piece, loaded)
