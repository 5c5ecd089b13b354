"""What each attention layout needs to know about a packed micro-batch, built from segment lengths on the host.

Builders are pure functions of (lengths, padding, device, window): no device value is read, and index tensors reach a
GPU through pinned memory without making the host wait. When they run, once per micro-batch or once per layer, is
decided in ``layers/packed_metadata.py``. What masks owe to distances alone they ask a band source for.

Shape suffixes: T tokens, V valid tokens, S segments, R rows of the kernel's input, L longest piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_glue.backends.attention_masks import BandSource, CausalBand, build_band

# Below this length one call per segment costs more than the rows that padding adds (2-core CPU, 4 heads of 64).
_LONGEST_PADDED_SEGMENT = 128
_PADDED_LENGTH_MULTIPLE = 16


@dataclass(frozen=True, eq=False)
class SegmentsMetadata:
    """Segments in batches of one padded length each.

    Attributes:
        num_tokens: T.
        num_valid_tokens: V.
        pieces: (number of segments, padded length) of each batch, in the order of the kernel's rows.
        gather_R: int64. Token that stands at each row; a padded row repeats its segment's last token, so it holds no
            stranger's value. ``None`` if the rows are the valid tokens as they are.
        row_of_token_V: int64. Row at which each token stands; ``None`` likewise.
        window_bias_LL: fp32. 0 where a query may see a key and -inf elsewhere; pieces use its upper left corner.
            ``None`` if no segment is longer than the window.
    """

    num_tokens: int
    num_valid_tokens: int
    pieces: tuple[tuple[int, int], ...]
    gather_R: Tensor | None
    row_of_token_V: Tensor | None
    window_bias_LL: Tensor | None


@dataclass(frozen=True, eq=False)
class VarlenMetadata:
    """Boundaries for kernels that take cumulative lengths.

    Attributes:
        num_tokens: T.
        num_valid_tokens: V, equal to the last boundary.
        cu_seqlens: int32 [S + 1], strictly increasing from 0.
        max_seqlen: Longest segment, a host integer.
    """

    num_tokens: int
    num_valid_tokens: int
    cu_seqlens: Tensor
    max_seqlen: int


@dataclass(frozen=True, eq=False)
class DenseMetadata:
    """A full mask.

    Attributes:
        num_tokens: T.
        num_valid_tokens: V.
        allowed_VV: bool, True where the query (row) may see the key (column).
    """

    num_tokens: int
    num_valid_tokens: int
    allowed_VV: Tensor


@dataclass(frozen=True, eq=False)
class FlexMetadata:
    """A block-sparse mask.

    Attributes:
        num_tokens: T.
        num_valid_tokens: V.
        block_mask: ``BlockMask`` over the valid tokens; ``None`` if there are none.
    """

    num_tokens: int
    num_valid_tokens: int
    block_mask: Any | None


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device; from pinned memory for CUDA, because a pageable copy makes the host wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def effective_window(window: int, lengths: Sequence[int]) -> int:
    """Return 0 for a window that no segment is longer than: it hides nothing."""
    return window if 0 < window < max(lengths, default=0) else 0


def _batch_segments(lengths: Sequence[int]) -> dict[int, list[int]]:
    """Map each padded length to its segments; a batch of one segment keeps its exact length."""
    batches: dict[int, list[int]] = {}
    for segment, length in enumerate(lengths):
        padded = -(-length // _PADDED_LENGTH_MULTIPLE) * _PADDED_LENGTH_MULTIPLE
        batches.setdefault(padded if padded <= _LONGEST_PADDED_SEGMENT else -1 - segment, []).append(segment)
    return batches


def build_segments(
    lengths: Sequence[int],
    num_pad_tokens: int,
    device: torch.device,
    window: int,
    bands: BandSource = build_band,
) -> SegmentsMetadata:
    """Batch short segments by padded length; leave long ones alone.

    Args:
        lengths: Tokens per segment, each at least 1.
        num_pad_tokens: Dead tokens behind them.
        device: Where index tensors go.
        window: Tokens that a query sees, itself included; 0 for all.
        bands: Where the window's bias comes from.

    Returns:
        The metadata.
    """
    num_valid = sum(lengths)
    window_bias_LL = None
    if effective_window(window, lengths):
        # Padding may stretch a short piece beyond the longest segment.
        longest = -(-max(lengths) // _PADDED_LENGTH_MULTIPLE) * _PADDED_LENGTH_MULTIPLE
        window_bias_LL = bands(CausalBand(longest, longest, 0, window, torch.float32, device))
    batches = _batch_segments(lengths)
    if all(len(segments) == 1 for segments in batches.values()):
        pieces = tuple((1, length) for length in lengths)
        return SegmentsMetadata(num_valid + num_pad_tokens, num_valid, pieces, None, None, window_bias_LL)
    starts = np.cumsum((0, *lengths))[:-1]
    pieces_list: list[tuple[int, int]] = []
    gather: list[np.ndarray] = []
    row_of_token = np.empty(num_valid, dtype=np.int64)
    num_rows = 0
    for padded, segments in batches.items():
        length = padded if len(segments) > 1 else lengths[segments[0]]
        offsets = np.arange(length)
        for segment in segments:
            start, real = starts[segment], lengths[segment]
            gather.append(start + np.minimum(offsets, real - 1))
            row_of_token[start : start + real] = num_rows + offsets[:real]
            num_rows += length
        pieces_list.append((len(segments), length))
    return SegmentsMetadata(
        num_tokens=num_valid + num_pad_tokens,
        num_valid_tokens=num_valid,
        pieces=tuple(pieces_list),
        gather_R=to_device(np.concatenate(gather), device),
        row_of_token_V=to_device(row_of_token, device),
        window_bias_LL=window_bias_LL,
    )


def build_varlen(
    lengths: Sequence[int],
    num_pad_tokens: int,
    device: torch.device,
    window: int,
    bands: BandSource = build_band,
) -> VarlenMetadata:
    """Sum lengths up. See :func:`build_segments`; the window is an argument of the kernel, not part of this."""
    cu_seqlens = np.cumsum((0, *lengths), dtype=np.int64).astype(np.int32)
    num_valid = sum(lengths)
    return VarlenMetadata(num_valid + num_pad_tokens, num_valid, to_device(cu_seqlens, device), max(lengths, default=0))


def _segment_ids(lengths: Sequence[int], device: torch.device) -> Tensor:
    counts = np.array(lengths, dtype=np.int64)
    return to_device(np.repeat(np.arange(len(counts), dtype=np.int32), counts), device)


def build_dense(
    lengths: Sequence[int],
    num_pad_tokens: int,
    device: torch.device,
    window: int,
    bands: BandSource = build_band,
) -> DenseMetadata:
    """Build the mask on the device: same segment AND not later AND inside the window. See :func:`build_segments`."""
    ids_V = _segment_ids(lengths, device)
    num_valid = ids_V.shape[0]
    band_VV = bands(CausalBand(num_valid, num_valid, 0, effective_window(window, lengths), torch.bool, device))
    allowed_VV = (ids_V[:, None] == ids_V) & band_VV
    return DenseMetadata(num_valid + num_pad_tokens, num_valid, allowed_VV)


def build_flex(
    lengths: Sequence[int],
    num_pad_tokens: int,
    device: torch.device,
    window: int,
    bands: BandSource = build_band,
) -> FlexMetadata:
    """Build a block mask: same segment AND not later AND inside the window. See :func:`build_segments`."""
    # The import costs a second (it loads the compiler), which only this layout should pay.
    from torch.nn.attention.flex_attention import create_block_mask

    num_valid = sum(lengths)
    if num_valid == 0:
        return FlexMetadata(num_pad_tokens, 0, None)
    ids_V = _segment_ids(lengths, device)
    reach = effective_window(window, lengths) or num_valid

    def is_allowed(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (ids_V[query] == ids_V[key]) & (query >= key) & (query - key < reach)

    block_mask = create_block_mask(is_allowed, None, None, num_valid, num_valid, device=str(device))
    return FlexMetadata(num_valid + num_pad_tokens, num_valid, block_mask)


class MetadataBuilder(Protocol):
    """Builds the metadata of one layout. See :func:`build_segments`."""

    def __call__(
        self,
        lengths: Sequence[int],
        num_pad_tokens: int,
        device: torch.device,
        window: int,
        bands: BandSource = build_band,
    ) -> Any:
        """Return frozen metadata."""
        ...


METADATA_BUILDERS: dict[str, MetadataBuilder] = {
    "segments": build_segments,
    "varlen": build_varlen,
    "dense": build_dense,
    "flex": build_flex,
    "te": build_varlen,
}

# Layouts whose metadata holds the window; in the others it is an argument of the kernel.
WINDOWED_LAYOUTS = frozenset({"segments", "dense", "flex"})
