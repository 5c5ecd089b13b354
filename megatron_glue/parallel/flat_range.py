"""One rank's part of a parameter that was flattened and cut without regard to its dims, as ZeRO does.

The parameter itself then holds a rounded copy, or nothing at all. Its fp32 values are what checkpoints and comparisons
want, so the range is attached to it, like its spec.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_MASTER_ATTRIBUTE = "master_range"


@dataclass(frozen=True, eq=False)
class FlatRange:
    """A range of a flattened tensor.

    Attributes:
        values: One dim, contiguous: the range's elements; none if the rank holds nothing.
        start: Index of the first of them in the flattened tensor.
    """

    values: Tensor
    start: int

    def whole(self, shape: tuple[int, ...], group: ProcessGroup | None) -> Tensor:
        """The tensor that the ranges of all ranks of a group make up.

        Args:
            shape: Its shape.
            group: Ranks whose ranges cover it without overlap; ``None``: this one alone does.

        Returns:
            A new tensor, the same on all of them. Collective.
        """
        flat = torch.zeros(torch.Size(shape).numel(), dtype=self.values.dtype, device=self.values.device)
        flat[self.start : self.start + self.values.numel()] = self.values
        if group is not None:
            dist.all_reduce(flat, group=group)
        return flat.view(shape)


def set_master(param: Tensor, master: FlatRange) -> None:
    """Say where this rank's fp32 values of a parameter are, if not in the parameter itself."""
    setattr(param, _MASTER_ATTRIBUTE, master)


def get_master(param: Tensor) -> FlatRange | None:
    """This rank's range of a parameter's fp32 values; ``None`` if the parameter holds them."""
    return getattr(param, _MASTER_ATTRIBUTE, None)
