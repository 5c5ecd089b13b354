"""Moves what chosen modules of a block keep for backward off the device, without recompute.

Layers mark stretches of their forward as regions (``context.region("attn_core")``). Inside a chosen region autograd's
saved tensors are packed: the storage behind a tensor leaves the device, and autograd keeps a description of the view.
When the block's backward asks for the first of them, all come back in one buffer, through the same reload buffers and
in the same reverse order as the inputs of recomputed blocks; the buffer is given back when that backward has ended.

What stays on the device: weights, views of them and casts of them to the compute type; tensors below a size; views of a
small part of a storage. A storage leaves once, however many saved tensors view it. The hooks are those of
``torch.autograd.graph.saved_tensors_hooks``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_glue.activation.extents import round_up
from megatron_glue.activation.offloader import InputOffloader, OffloadedInput
from megatron_glue.activation.recompute import enter_block
from megatron_glue.types import ForwardContext

LEAST_SHARE = 8
"""A view moves its storage if it covers at least one part in this many of it (q, k and v of one product: a third)."""


@dataclass(frozen=True)
class _MovedTensor:
    """How a saved tensor looks at a storage that left the device.

    Attributes:
        begin: Byte of the group's buffer where the storage begins.
        num_bytes: Size of the storage.
        dtype: Of the tensor.
        shape: Of the tensor.
        stride: Of the tensor, in elements.
        offset: Of the tensor in the storage, in elements.
    """

    begin: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def run_offloaded(
    block: Callable[[Tensor, ForwardContext], Tensor],
    x: Tensor,
    context: ForwardContext,
    call: ModuleTensors,
) -> Tensor:
    """Run a block whose chosen regions keep their saved tensors off the device.

    Args:
        block: Called once, as ``block(x, context)``.
        x: Its input, any shape.
        context: The micro-batch, outside any block.
        call: New for this call.

    Returns:
        The block's output.

    Raises:
        OSError: The tier is full or cannot be written.
    """
    (entered,) = enter_block(call, x)
    y = block(entered, replace(context, saved_tensor_regions=call.region))
    call.end_forward(context.micro_batch)
    if not y.requires_grad:
        call.finish()
    return y


class ModuleTensors:
    """The saved tensors of one block call between its forward and the end of its backward.

    Args:
        offloader: Moves them.
        modules: Names of the regions whose tensors move.
        weights: Whose storages stay.
        least_bytes: Smaller tensors stay.

    Attributes:
        claim: On what left, once the block has run; None if nothing did.
    """

    def __init__(
        self, offloader: InputOffloader, modules: frozenset[str], weights: list[nn.Parameter], least_bytes: int
    ) -> None:
        self._offloader = offloader
        self._modules = modules
        self._least_bytes = least_bytes
        own = [getattr(weight, "_local_tensor", weight) for weight in weights]
        self._weight_storages = {weight.untyped_storage()._cdata for weight in own}
        # Casts of stacked weights are made inside a region, out of sight of who enters it.
        stacked = [weight for weight in own if weight.dim() >= 3]
        self._weight_shapes = {tuple(sorted(shape)) for w in stacked for shape in (w.shape, w.flatten(1, 2).shape)}
        # The weak reference keeps the key from being taken by another storage.
        self._moved: dict[tuple[int, int], tuple[StorageWeakRef, int]] = {}
        self._num_bytes = 0
        self.claim: OffloadedInput | None = None
        self._buffer: Tensor | None = None
        self._is_finished = False

    def region(self, name: str, weights: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Return the context of one stretch of a layer's forward, in which these weights, perhaps casts, are used."""
        # Autograd keeps them, so their storages live as long as this call's forward.
        self._weight_storages.update(weight.untyped_storage()._cdata for weight in weights)
        return saved_tensors_hooks(self._pack, self._unpack) if name in self._modules else nullcontext()

    def end_forward(self, micro_batch: int) -> None:
        """The block has run: what left is one group from here on."""
        self.claim = self._offloader.gather(micro_batch)
        self._moved.clear()

    def finish(self) -> None:
        """End of the block's backward: nothing issued from now on reads the group's buffer."""
        if not self._is_finished:
            self._is_finished = True
            self._buffer = None
            if self.claim is not None:
                self.claim.release()

    def _pack(self, tensor: Tensor) -> Tensor | _MovedTensor:
        if not self._leaves(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version)
        if key not in self._moved:
            content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._offloader.store_piece(content)
            self._moved[key] = (StorageWeakRef(storage), self._num_bytes)
            self._num_bytes += round_up(storage.nbytes())
        begin = self._moved[key][1]
        return _MovedTensor(
            begin, storage.nbytes(), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def _leaves(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.nbytes < self._least_bytes:
            return False
        storage = tensor.untyped_storage()
        is_weight = storage._cdata in self._weight_storages or tuple(sorted(tensor.shape)) in self._weight_shapes
        return not is_weight and tensor.nbytes * LEAST_SHARE >= storage.nbytes()

    def _unpack(self, packed: Tensor | _MovedTensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self._is_finished or self.claim is None:
            raise RuntimeError(
                "a tensor that was offloaded for backward was asked for after the block's backward had ended: backward "
                "ran through the block a second time (retain_graph)"
            )
        if self._buffer is None:
            self._buffer = self.claim.fetch()
        num_bytes = packed.num_bytes - packed.num_bytes % packed.dtype.itemsize
        elements = self._buffer[packed.begin : packed.begin + num_bytes].view(packed.dtype)
        return elements.as_strided(packed.shape, packed.stride, int(elements.storage_offset()) + packed.offset)
