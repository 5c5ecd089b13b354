"""One micro-batch as the loader hands it to the training step.

It carries token ids, labels and the packed layout. It does not carry masks, and the number of trained tokens is a host
integer, so that the loss can be normalised over the whole optimizer step without reading the device.

Shape suffixes: T tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_glue.types.packed_sequence import PackedSequence

IGNORE_LABEL = -100


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Token ids, labels and layout of one micro-batch.

    Attributes:
        input_ids_T: int64 token ids.
        labels_T: int64 next-token ids; ``IGNORE_LABEL`` on the last token of a segment and on padding.
        sequence: The layout, for the same T tokens.
        num_label_tokens: Number of labels here that are not ``IGNORE_LABEL`` (host integer).
        pack_ids: Index in the global stream of packs of each pack in this micro-batch.
    """

    input_ids_T: Tensor
    labels_T: Tensor
    sequence: PackedSequence
    num_label_tokens: int
    pack_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        expected = (self.sequence.num_tokens,)
        for name, tensor in (("input_ids_T", self.input_ids_T), ("labels_T", self.labels_T)):
            if tuple(tensor.shape) != expected:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the layout describes {expected}")
            if tensor.dtype != torch.int64:
                raise ValueError(f"{name} has dtype {tensor.dtype}; expected torch.int64")
        if not 0 <= self.num_label_tokens <= self.sequence.num_valid_tokens:
            raise ValueError(
                f"num_label_tokens={self.num_label_tokens}: must lie between 0 and the "
                f"{self.sequence.num_valid_tokens} valid tokens"
            )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """Return the batch with all tensors on ``device``; itself if they are there already."""
        if torch.device(device) == self.input_ids_T.device:
            return self
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> PackedBatch:
        """Return the batch with ``function`` applied to each tensor, those of its layout included."""
        return replace(
            self,
            input_ids_T=function(self.input_ids_T),
            labels_T=function(self.labels_T),
            sequence=self.sequence.map_tensors(function),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the batch, those of its layout included."""
        return self.input_ids_T, self.labels_T, *self.sequence.tensors
