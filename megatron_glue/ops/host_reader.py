"""The one door through which a device value reaches the host, so that every such read is counted.

A read makes the host wait for the device: on a GPU each one drains the queue of launched kernels. The optimised paths
read nothing; the baselines read as common stacks do, and the counter proves the difference.

A read that cannot be avoided is started early and awaited late. On a GPU its value is computed and copied to pinned
memory on a stream of its own, beside whatever is launched in between; the host waits for that copy alone, not for the
queue of the present stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PendingRead:
    """A read under way; see :meth:`HostReader.start_read`.

    Args:
        reader: Counts the read when it is awaited.
        make: Returns the value.
        device: Where the value is.
        side_stream: Where it is made and copied; ``None`` makes it when it is awaited.
    """

    def __init__(
        self, reader: HostReader, make: Callable[[], Tensor], device: torch.device, side_stream: Any | None
    ) -> None:
        self._reader = reader
        # Holds everything that the value is made from until the read has ended.
        self._make = make
        self._value: Tensor | None = None
        self._staged: Tensor | None = None
        self._event: Any = None
        if side_stream is None:
            return
        side_stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side_stream):
            self._value = make()
            self._staged = torch.empty(self._value.shape, dtype=self._value.dtype, pin_memory=True)
            self._staged.copy_(self._value, non_blocking=True)
            self._event = side_stream.record_event()

    def wait(self) -> Any:
        """Wait for the value; once.

        Returns:
            A Python number for a scalar, else a (nested) list.
        """
        if self._event is None:
            return self._reader.read(self._make())
        self._event.synchronize()
        assert self._staged is not None, "a started copy has its destination"
        return self._reader.read(self._staged)


class HostReader:
    """Counts device-to-host reads.

    Attributes:
        count: Reads since construction, on any device (on a CPU a read is cheap, but it is counted all the same).
    """

    def __init__(self) -> None:
        self.count = 0
        self._side_streams: dict[torch.device, Any] = {}

    def read(self, tensor: Tensor) -> Any:
        """Copy a tensor to the host.

        Args:
            tensor: Any shape and dtype.

        Returns:
            A Python number for a scalar, else a (nested) list.
        """
        self.count += 1
        return tensor.tolist()

    def start_read(self, make: Callable[[], Tensor], device: torch.device) -> PendingRead:
        """Start to copy a tensor to the host.

        Args:
            make: Returns the tensor, of any shape and dtype. On a GPU it is called at once, on a stream that follows
                the present one: what it waits for (a collective) is not waited for by the present stream. Elsewhere it
                is called when the read is awaited. It must not change what it works on.
            device: Where the tensor is.

        Returns:
            The read, which counts as one when it is awaited.
        """
        if device.type != "cuda":
            return PendingRead(self, make, device, None)
        if device not in self._side_streams:
            self._side_streams[device] = torch.cuda.Stream(device)
        return PendingRead(self, make, device, self._side_streams[device])

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
