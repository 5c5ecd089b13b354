"""A copy of what a rank writes, in host memory, so that training can go on while it is written.

One buffer of exact size holds all parts; it is made at the first save and used again at every later one. On CUDA it is
pinned and filled on a stream of its own. The training thread waits for the copy: the next step may change weights and
moments as soon as it has returned.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from megatron_glue.activation.device_api import CudaDevice, DeviceApi
from megatron_glue.activation.extents import round_up
from megatron_glue.training.checkpoint.parts import Part
from megatron_glue.training.checkpoint.tensors import NamedPart

_ALIGNMENT_BYTES = 64


class HostStaging:
    """The buffer of one run.

    Args:
        device: Where the run computes.
        device_api: Access to an accelerator; unset: CUDA if ``device`` is one, plain copies otherwise.

    Attributes:
        num_allocations: Buffers made so far: 1 as long as no save was larger than the first.
        num_copies: Tensors copied so far.
        copied_bytes: Their bytes.
        copy_seconds: Time that the training thread spent here.
    """

    def __init__(self, device: torch.device, device_api: DeviceApi | None = None) -> None:
        self._device_type = device.type
        self._api = device_api or (CudaDevice(device) if device.type == "cuda" else None)
        self._stream = self._api.new_stream() if self._api is not None else None
        self._buffer: Tensor | None = None
        self.num_allocations = self.num_copies = self.copied_bytes = 0
        self.copy_seconds = 0.0

    @property
    def held_bytes(self) -> int:
        """Size of the buffer."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def stage(self, parts: list[NamedPart]) -> list[NamedPart]:
        """Copy parts to the host; what an earlier call returned is overwritten.

        Args:
            parts: On the device or the host.

        Returns:
            The same parts, in the buffer. The copies have ended.
        """
        start = time.perf_counter()
        ends = [0]
        for entry in parts:
            ends.append(ends[-1] + -(-entry.part.tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        buffer = self._room(ends[-1])
        if self._api is not None and self._stream is not None:
            # The last optimizer step may still be running.
            self._stream.wait_event(self._api.record(self._api.current_stream()))
        staged = []
        for entry, begin in zip(parts, ends, strict=False):
            source = entry.part.tensor
            copy = buffer[begin : begin + source.nbytes].view(source.dtype).view(source.shape)
            if self._api is not None and source.device.type == self._device_type:
                self._api.copy(copy, source, self._stream)
            else:
                copy.copy_(source)
            staged.append(NamedPart(entry.name, entry.shape, Part(entry.part.offsets, copy)))
        if self._api is not None:
            self._api.record(self._stream).synchronize()
        self.num_copies += len(parts)
        self.copied_bytes += sum(math.prod(entry.part.sizes) * entry.part.tensor.itemsize for entry in parts)
        self.copy_seconds += time.perf_counter() - start
        return staged

    def close(self) -> None:
        """Give the buffer back. Nothing that :meth:`stage` returned may be in use."""
        if self._buffer is not None and self._api is not None:
            self._api.free_host(self._buffer)
        self._buffer = None

    def _room(self, num_bytes: int) -> Tensor:
        if self._buffer is None or self._buffer.nbytes < num_bytes:
            self.close()
            self.num_allocations += 1
            num_bytes = round_up(max(num_bytes, 1))
            if self._api is not None:
                self._buffer = self._api.allocate_host(num_bytes)
            else:
                self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer
