"""Attention metadata of a packed micro-batch: built once and shared by all layers, or anew in each of them.

Enabled, the first layer builds it from lengths that the HOST has known since packing, and every other layer, recompute
included, finds it with the micro-batch (see ``cache.py``).

Where it is small, it is built before: the thread that fetches the next step's batches calls
:meth:`PackedMetadataCache.prepare` for each, beside the current step. It counts as built when the first layer asks.

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
from megatron_glue.layers.cache import CacheManager
from megatron_glue.layers.long_lived_cache import CacheKey, CacheLimits
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.types import PackedSequence

Value = TypeVar("Value")

METADATA = "attention_metadata"
INDEX_MAPS = "context_index_maps"

# Metadata of these layouts grows with the tokens. A mask grows with their square: those of a whole step, built ahead,
# would take the memory that one at a time does not.
PREPARED_LAYOUTS = frozenset({"segments", "varlen", "te"})


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
    """Hands layers what they need to know of the micro-batch at hand. One per model.

    Args:
        layout: A key of ``METADATA_BUILDERS``, from ``Backends.attention_layout``.
        enabled: Build once per micro-batch; else in every call.
        host_reader: Counts reads of device values: none when enabled.
        context_layout: How a rank's queries meet the keys of other context-parallel ranks, from
            ``Backends.context_layout``; empty when no sequence is split.
        limits: Of what outlives a micro-batch.

    Attributes:
        manager: Keeps the values and counts them by kind.
    """

    def __init__(
        self,
        layout: str,
        enabled: bool,
        host_reader: HostReader,
        context_layout: str = "",
        limits: CacheLimits | None = None,
    ) -> None:
        if layout not in METADATA_BUILDERS:
            raise ValueError(f"layout={layout!r}: unknown; one of {sorted(METADATA_BUILDERS)}")
        if context_layout not in ("", "gather", "ring"):
            raise ValueError(f"context_layout={context_layout!r}: unknown; gather, ring or empty")
        self.layout = layout
        self.context_layout = context_layout
        self.enabled = enabled
        self.host_reader = host_reader
        self.manager = CacheManager(enabled, limits)
        self._windows: set[int] = set()
        self._shared: dict[tuple[str, Hashable], Callable[[PackedSequence], Any]] = {}

    @property
    def builds(self) -> int:
        """Times that attention metadata was built."""
        return self.manager.statistics.of(METADATA).misses

    @property
    def reuses(self) -> int:
        """Times that it was found."""
        return self.manager.statistics.of(METADATA).hits

    @property
    def built_ahead(self) -> int:
        """Those of the builds that were made by :meth:`prepare`."""
        return self.manager.statistics.of(METADATA).built_ahead

    def expect(self, window: int) -> None:
        """Say that a layer will ask for metadata; layers do so when they are built.

        Args:
            window: As in :meth:`for_sequence`.
        """
        self._windows.add(window)

    def expect_rows(self, kind: str, parameters: Hashable, build: Callable[[PackedSequence], Any]) -> None:
        """Say that layers will share rows of a position table.

        They are prepared where the table is on the host, so that they come over beside the step before; rows of a table
        on the device are quick to look up, and take more memory than all else that is prepared.

        Args:
            kind: As in :meth:`share`.
            parameters: As in :meth:`share`.
            build: As in :meth:`share`.
        """
        if self.manager.long_lived.limits.tier == "host":
            self._shared[kind, parameters] = build

    def prepare(self, sequence: PackedSequence) -> list[Tensor]:
        """Build what layers will ask for, ahead of them and in any thread, on the current stream.

        Args:
            sequence: A micro-batch that no layer has seen yet, on the device of the layers.

        Returns:
            The tensors that were made; on a GPU the caller keeps their memory for the stream that uses them. Nothing if
            the cache is disabled. Metadata that contains masks is left to the first layer.
        """
        tensors: list[Tensor] = []
        if not self.enabled:
            return tensors
        for (kind, parameters), build in self._shared.items():
            key = CacheKey(kind, parameters, sequence.device)
            tensors += self.manager.prepare(sequence, key, lambda build=build: build(sequence))
        if self.layout not in PREPARED_LAYOUTS:
            return tensors
        for window in sorted(self._windows):
            key, holds_mask, build_metadata = self._plan(sequence, window)
            if not holds_mask:
                tensors += self.manager.prepare(sequence, key, build_metadata)
        return tensors

    def for_sequence(self, sequence: PackedSequence, window: int = 0) -> Any:
        """Return the metadata of one micro-batch for one kind of layer.

        Args:
            sequence: The micro-batch, on the device of the layer.
            window: Tokens that a query of this layer sees, itself included; 0 for all.

        Returns:
            The frozen metadata of the cache's layout; ``ContextMetadata`` for a part of split sequences.
        """
        key, _, build = self._plan(sequence, window)
        if not self.enabled and sequence.context_shard is None:
            # A shard's own rows do not show the lengths of whole segments: built in every call, without reads.
            lengths, num_pad_tokens = read_lengths(sequence.segment_ids_T, self.host_reader)
            return self.manager.of_batch(
                sequence, key, lambda: self._build(lengths, num_pad_tokens, sequence.device, window)
            )
        return self.manager.of_batch(sequence, key, build)

    def share(
        self, sequence: PackedSequence, kind: str, parameters: Hashable, build: Callable[[PackedSequence], Value]
    ) -> Value:
        """Return another value that layers derive from a micro-batch, such as the angles of its positions.

        Args:
            sequence: The micro-batch.
            kind: What it is; it has counters of its own.
            parameters: What the value depends on beside the sequence and its device.
            build: Returns the value; called once per micro-batch when the cache is enabled, else in every call.

        Returns:
            The value; never write to it.
        """
        return self.manager.of_batch(sequence, CacheKey(kind, parameters, sequence.device), lambda: build(sequence))

    def _plan(self, sequence: PackedSequence, window: int) -> tuple[CacheKey, bool, Callable[[], Any]]:
        """Return the key of an entry, whether it holds masks, and what builds it.

        The lengths are part of the sequence that owns the entry; the rest of what a value depends on is the key.
        Windows that hide nothing share one entry.
        """
        shard, device, is_varlen = sequence.context_shard, sequence.device, self.layout == "varlen"
        if shard is not None:
            assert self.context_layout, "the model was not built for split sequences"
            window = effective_window(window, shard.lengths)
            cut = (shard.rank, shard.size, shard.alignment)
            is_ring = self.context_layout == "ring"
            # In a ring pieces see all or none of others' keys. Cumulative lengths say what a band would, but there.
            holds_mask = window > 0 if is_ring else not is_varlen
            key = CacheKey(METADATA, (self.layout, self.context_layout, window, cut), device)
            return key, holds_mask, lambda: self._build_shard(sequence, window)
        window = effective_window(window, sequence.lengths) if self.layout in WINDOWED_LAYOUTS else 0
        lengths, num_pad_tokens = sequence.lengths, sequence.num_pad_tokens
        key = CacheKey(METADATA, (self.layout, window), device)
        return key, window > 0, lambda: self._build(lengths, num_pad_tokens, device, window)

    def _build(self, lengths: Sequence[int], num_pad_tokens: int, device: torch.device, window: int) -> Any:
        return METADATA_BUILDERS[self.layout](lengths, num_pad_tokens, device, window, self.manager.band)

    def _build_shard(self, sequence: PackedSequence, window: int) -> Any:
        shard = sequence.context_shard
        assert shard is not None, "planned for a shard"
        # Of all windows and layers, and of host integers only.
        key = CacheKey(INDEX_MAPS, (shard.size, shard.alignment), torch.device("cpu"))
        return build_context(
            sequence,
            window,
            is_ring=self.context_layout == "ring",
            is_varlen=self.layout == "varlen",
            bands=self.manager.band,
            token_ids_of_ranks=self.manager.of_batch(sequence, key, shard.token_ids_of_ranks),
        )
