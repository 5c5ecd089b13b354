"""The one door through which a device value reaches the host, so that every such read is counted.

A read makes the host wait for the device: on a GPU each one drains the queue of launched kernels. The optimised paths
read nothing; the baselines read as common stacks do, and the counter proves the difference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostReader:
    """Counts device-to-host reads.

    Attributes:
        count: Reads since construction, on any device (on a CPU a read is cheap, but it is counted all the same).
    """

    def __init__(self) -> None:
        self.count = 0

    def read(self, tensor: Tensor) -> Any:
        """Copy a tensor to the host.

        Args:
            tensor: Any shape and dtype.

        Returns:
            A Python number for a scalar, else a (nested) list.
        """
        self.count += 1
        return tensor.tolist()

    def count_reads_of_library(self, num_reads: int) -> None:
        """Count reads that a library call makes on its own, so that they are not hidden by being somebody else's.

        Args:
            num_reads: How many.
        """
        self.count += num_reads

    def where(self, mask: Tensor) -> tuple[Tensor, ...]:
        """Find the true elements of a mask; the size of the answer is a device value, so this is a read.

        Args:
            mask: bool, any shape.

        Returns:
            One int64 index tensor per dim of the mask, on its device.
        """
        self.count += 1
        return torch.where(mask)
