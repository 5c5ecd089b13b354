"""Attention metadata of a packed micro-batch: built once and shared by all layers, or anew in each of them.

Enabled, the first layer builds it from lengths that the HOST has known since packing, and every other layer, recompute
included, finds it in ``sequence.cache_entries``. Entries belong to the immutable layout they were derived from: they
die with it, so nothing is invalidated by hand, micro-batches in flight do not evict each other, and memory does not
grow with the number of layouts seen.

Where it is small, it is built before: the thread that fetches the next step's batches calls
:meth:`PackedMetadataCache.prepare` for each, beside the current step. It counts as built when the first layer asks.

What else follows from the layout alone is shared in the same way through :meth:`PackedMetadataCache.share`.

Disabled, each call does what common stacks do in every layer: find the boundaries in the batch's DEVICE tensor, read
them on the host, and build. Values, layout and kernel are the same, so both ways give the same bits. Only what a
context-parallel rank cannot see in its own rows, the lengths of whole segments, is taken from the host there too.

Shape suffixes: T tokens, S segments (with padding as one more).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_glue.backends.attention_context_metadata import build_context
from megatron_glue.backends.attention_metadata import METADATA_BUILDERS, WINDOWED_LAYOUTS, effective_window
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.types import PackedSequence

Value = TypeVar("Value")

# Metadata of these layouts grows with the tokens. A mask grows with their square: those of a whole step, built ahead,
# would take the memory that one at a time does not.
PREPARED_LAYOUTS = frozenset({"segments", "varlen"})


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Metadata that nobody has asked for yet. Counters belong to the thread that trains, so it is counted then."""

    metadata: Any


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
        built_ahead: Those of the builds that were made by :meth:`prepare`.
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
        self.built_ahead = 0
        self._windows: set[int] = set()

    def expect(self, window: int) -> None:
        """Say that a layer will ask for metadata; layers do so when they are built.

        Args:
            window: As in :meth:`for_sequence`.
        """
        self._windows.add(window)

    def prepare(self, sequence: PackedSequence) -> list[Tensor]:
        """Build what layers will ask for, ahead of them and in any thread, on the current stream.

        Args:
            sequence: A micro-batch that no layer has seen yet, on the device of the layers.

        Returns:
            The tensors that were made; on a GPU the caller keeps their memory for the stream that uses them. Nothing if
            the cache is disabled or the metadata contains masks: then the first layer builds it.
        """
        tensors: list[Tensor] = []
        if not self.enabled or self.layout not in PREPARED_LAYOUTS:
            return tensors
        for window in sorted(self._windows):
            key, holds_mask, build = self._plan(sequence, window)
            if key not in sequence.cache_entries and not holds_mask:
                metadata = build()
                sequence.cache_entries[key] = _Prepared(metadata)
                tensors += _tensors_of(metadata)
        return tensors

    def for_sequence(self, sequence: PackedSequence, window: int = 0) -> Any:
        """Return the metadata of one micro-batch for one kind of layer.

        Args:
            sequence: The micro-batch, on the device of the layer.
            window: Tokens that a query of this layer sees, itself included; 0 for all.

        Returns:
            The frozen metadata of the cache's layout; ``ContextMetadata`` for a part of split sequences.
        """
        if not self.enabled and sequence.context_shard is None:
            lengths, num_pad_tokens = read_lengths(sequence.segment_ids_T, self.host_reader)
            return self._counted(lambda: self._build(lengths, num_pad_tokens, sequence.device, window))
        key, _, build = self._plan(sequence, window)
        if not self.enabled:
            # A shard's own rows do not show the lengths of whole segments: built in every call, without reads.
            return self._counted(build)
        entry = sequence.cache_entries.get(key)
        if isinstance(entry, _Prepared):
            entry = sequence.cache_entries[key] = entry.metadata
            self.builds += 1
            self.built_ahead += 1
        elif entry is None:
            entry = sequence.cache_entries[key] = self._counted(build)
        else:
            self.reuses += 1
        return entry

    def _plan(self, sequence: PackedSequence, window: int) -> tuple[Hashable, bool, Callable[[], Any]]:
        """Return the key of an entry, whether it holds masks, and what builds it.

        The lengths are part of the sequence that owns the entry; the rest of what a value depends on is the key.
        Windows that hide nothing share one entry.
        """
        shard, device, is_varlen = sequence.context_shard, sequence.device, self.layout == "varlen"
        if shard is not None:
            assert self.context_layout, "the model was not built for split sequences"
            window = effective_window(window, shard.lengths)
            key = (self.layout, self.context_layout, device, window, (shard.rank, shard.size, shard.alignment))
            is_ring = self.context_layout == "ring"
            # In a ring pieces see all or none of others' keys. Cumulative lengths say what a band would, but there.
            holds_mask = window > 0 if is_ring else not is_varlen
            return key, holds_mask, lambda: _build_shard(sequence, window, is_ring=is_ring, is_varlen=is_varlen)
        window = effective_window(window, sequence.lengths) if self.layout in WINDOWED_LAYOUTS else 0
        lengths, num_pad_tokens = sequence.lengths, sequence.num_pad_tokens
        key = (self.layout, device, window)
        return key, window > 0, lambda: self._build(lengths, num_pad_tokens, device, window)

    def _counted(self, build: Callable[[], Value]) -> Value:
        self.builds += 1
        return build()

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
        # Tensors born under inference_mode could not be saved for a backward that shares them.
        with torch.inference_mode(False):
            return METADATA_BUILDERS[self.layout](lengths, num_pad_tokens, device, window)


def _build_shard(sequence: PackedSequence, window: int, *, is_ring: bool, is_varlen: bool) -> Any:
    # See PackedMetadataCache._build.
    with torch.inference_mode(False):
        return build_context(sequence, window, is_ring=is_ring, is_varlen=is_varlen)


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in metadata."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors_of(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors_of(getattr(value, field.name))
