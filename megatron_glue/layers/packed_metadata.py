"""Attention metadata of a packed micro-batch: built once and shared by all layers, or anew in each of them.

Enabled, the first layer builds it from lengths that the HOST has known since packing, and every other layer, recompute
included, finds it in ``sequence.cache_entries``. Entries belong to the immutable layout they were derived from: they
die with it, so nothing is invalidated by hand, micro-batches in flight do not evict each other, and memory does not
grow with the number of layouts seen.

What else follows from the layout alone is shared in the same way through :meth:`PackedMetadataCache.share`.

Disabled, each call does what common stacks do in every layer: find the boundaries in the batch's DEVICE tensor, read
them on the host, and build. Values, layout and kernel are the same, so both ways give the same bits. Only what a
context-parallel rank cannot see in its own rows, the lengths of whole segments, is taken from the host there too.

Shape suffixes: T tokens, S segments (with padding as one more).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_glue.backends.attention_context_metadata import build_context
from megatron_glue.backends.attention_metadata import METADATA_BUILDERS, WINDOWED_LAYOUTS, effective_window
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.types import PackedSequence

Value = TypeVar("Value")


def read_lengths(segment_ids_T: Tensor, host_reader: HostReader) -> tuple[list[int], int]:
    """Recover what the packer knew from the device tensor it left behind.

    Args:
        segment_ids_T: Segment of each token, negative for padding at the tail.
        host_reader: Counts the two reads: how many boundaries there are, and where.

    Returns:
        Lengths of the live segments, and the number of padding tokens.
    """
    num_tokens = segment_ids_T.shape[0]
    if num_tokens == 0:
        return [], 0
    (last_tokens_S,) = host_reader.where(segment_ids_T[1:] != segment_ids_T[:-1])
    starts_S = torch.cat((last_tokens_S.new_zeros(1), last_tokens_S + 1))
    is_live_S = segment_ids_T[starts_S] >= 0
    starts, is_live = host_reader.read(torch.stack((starts_S, is_live_S)))
    lengths = [end - start for start, end in zip(starts, [*starts[1:], num_tokens], strict=True)]
    num_live = sum(is_live)
    return lengths[:num_live], sum(lengths[num_live:])


class PackedMetadataCache:
    """Hands attention layers the metadata of the micro-batch at hand. One per model.

    Args:
        layout: A key of ``METADATA_BUILDERS``, from ``Backends.attention_layout``.
        enabled: Build once per micro-batch; else in every call.
        host_reader: Counts reads of device values: none when enabled.
        context_layout: How a rank's queries meet the keys of other context-parallel ranks, from
            ``Backends.context_layout``; empty when no sequence is split.

    Attributes:
        builds: Times that attention metadata was built.
        reuses: Times that it was found.
    """

    def __init__(self, layout: str, enabled: bool, host_reader: HostReader, context_layout: str = "") -> None:
        if layout not in METADATA_BUILDERS:
            raise ValueError(f"layout={layout!r}: unknown; one of {sorted(METADATA_BUILDERS)}")
        if context_layout not in ("", "gather", "ring"):
            raise ValueError(f"context_layout={context_layout!r}: unknown; gather, ring or empty")
        self.layout = layout
        self.context_layout = context_layout
        self.enabled = enabled
        self.host_reader = host_reader
        self.builds = 0
        self.reuses = 0

    def for_sequence(self, sequence: PackedSequence, window: int = 0) -> Any:
        """Return the metadata of one micro-batch for one kind of layer.

        Args:
            sequence: The micro-batch, on the device of the layer.
            window: Tokens that a query of this layer sees, itself included; 0 for all.

        Returns:
            The frozen metadata of the cache's layout; ``ContextMetadata`` for a part of split sequences.
        """
        if sequence.context_shard is not None:
            return self._for_shard(sequence, window)
        if not self.enabled:
            lengths, num_pad_tokens = read_lengths(sequence.segment_ids_T, self.host_reader)
            return self._build(lengths, num_pad_tokens, sequence.device, window)
        # The lengths are part of the sequence that owns the entry; the rest of what a value depends on is the key.
        # Windows that hide nothing share one entry.
        window = effective_window(window, sequence.lengths) if self.layout in WINDOWED_LAYOUTS else 0
        key = (self.layout, sequence.device, window)
        return self._find(
            sequence, key, lambda: self._build(sequence.lengths, sequence.num_pad_tokens, sequence.device, window)
        )

    def _for_shard(self, sequence: PackedSequence, window: int) -> Any:
        """Return the metadata of one context-parallel rank. Disabled, it is built anew in every call, without reads."""
        shard = sequence.context_shard
        assert shard is not None
        assert self.context_layout, "the model was not built for split sequences"
        if not self.enabled:
            return self._build_shard(sequence, window)
        window = effective_window(window, shard.lengths)
        place = (shard.rank, shard.size, shard.alignment)
        key = (self.layout, self.context_layout, sequence.device, window, place)
        return self._find(sequence, key, lambda: self._build_shard(sequence, window))

    def _find(self, sequence: PackedSequence, key: Hashable, build: Callable[[], Any]) -> Any:
        entry = sequence.cache_entries.get(key)
        if entry is None:
            entry = sequence.cache_entries[key] = build()
        else:
            self.reuses += 1
        return entry

    def share(self, sequence: PackedSequence, key: Hashable, build: Callable[[], Value]) -> Value:
        """Return another value that layers derive from a micro-batch, such as the angles of its positions.

        It is no attention metadata and moves neither counter.

        Args:
            sequence: The micro-batch.
            key: What the value depends on beside the sequence and its device.
            build: Returns the value; called once per micro-batch when the cache is enabled, else in every call.

        Returns:
            The value; never write to it.
        """
        if not self.enabled:
            return build()
        key = (key, sequence.device)
        if key not in sequence.cache_entries:
            # See _build.
            with torch.inference_mode(False):
                sequence.cache_entries[key] = build()
        return sequence.cache_entries[key]

    def _build(self, lengths: Sequence[int], num_pad_tokens: int, device: torch.device, window: int) -> Any:
        self.builds += 1
        # Tensors born under inference_mode could not be saved for a backward that shares them.
        with torch.inference_mode(False):
            return METADATA_BUILDERS[self.layout](lengths, num_pad_tokens, device, window)

    def _build_shard(self, sequence: PackedSequence, window: int) -> Any:
        self.builds += 1
        # See _build.
        with torch.inference_mode(False):
            is_ring, is_varlen = self.context_layout == "ring", self.layout == "varlen"
            return build_context(sequence, window, is_ring=is_ring, is_varlen=is_varlen)
