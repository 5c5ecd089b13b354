"""What a query sees by its distance to a key alone: the causal triangle, or the band that a window leaves of it.

Which document a token belongs to is no part of it: a mask over a pack is this AND "same document", composed by the
builders of ``attention_metadata.py``. So a band depends on a few integers, and one serves every micro-batch that has
its lengths. Whoever keeps bands (``layers/cache.py``) hands a :data:`BandSource` to the builders; :func:`build_band`
is the one that keeps none.

Shape suffixes: L queries, K keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CausalBand:
    """Everything that a band depends on.

    Attributes:
        num_queries: L.
        num_keys: K.
        distance: Position of the first query less that of the first key.
        window: Tokens that a query sees, itself included; 0 for all before it.
        dtype: ``torch.bool``: True where a query sees a key; a floating dtype: 0 there and -inf elsewhere.
        device: Where it goes.
    """

    num_queries: int
    num_keys: int
    distance: int
    window: int
    dtype: torch.dtype
    device: torch.device

    @property
    def is_corner(self) -> bool:
        """Whether it is the upper left corner of every larger band of its window, dtype and device."""
        return self.distance == 0 and self.num_queries == self.num_keys


BandSource = Callable[[CausalBand], Tensor]
"""Returns a band [L, K]; never write to it."""


def build_band(band: CausalBand) -> Tensor:
    """Build a band on its device, without a host read.

    Args:
        band: Which one.

    Returns:
        [L, K] of its dtype.
    """
    queries_L = torch.arange(band.num_queries, dtype=torch.int32, device=band.device) + band.distance
    ahead_LK = queries_L[:, None] - torch.arange(band.num_keys, dtype=torch.int32, device=band.device)
    visible_LK = ahead_LK >= 0
    if band.window:
        visible_LK &= ahead_LK < band.window
    if band.dtype == torch.bool:
        return visible_LK
    zeros_LK = torch.zeros(visible_LK.shape, dtype=band.dtype, device=band.device)
    return zeros_LK.masked_fill_(~visible_LK, float("-inf"))
