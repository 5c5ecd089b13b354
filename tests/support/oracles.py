"""Slow, obvious versions of what the package computes fast, in float64 where precision matters.

Shape suffixes: T tokens, H query heads, G kv heads, C head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_glue.types import PackedSequence


def packed_attention(
    q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, sequence: PackedSequence, *, window: int, scale: float
) -> Tensor:
    """Attend token by token and head by head; each token sees itself and its past inside segment and window.

    Returns:
        [T, H, C] in the dtype of the queries; zeros for padding.
    """
    num_heads, num_groups = q_THC.shape[1], k_TGC.shape[1]
    rows = []
    start = 0
    for length in sequence.lengths:
        for token in range(start, start + length):
            first = max(start, token + 1 - window) if window else start
            heads = []
            for head in range(num_heads):
                group = head // (num_heads // num_groups)
                scores = (k_TGC[first : token + 1, group] @ q_THC[token, head]) * scale
                heads.append(torch.softmax(scores, 0) @ v_TGC[first : token + 1, group])
            rows.append(torch.stack(heads))
        start += length
    padding = q_THC[start:] * 0
    return torch.cat((torch.stack(rows), padding)) if rows else padding


def allowed_pairs(sequence: PackedSequence, window: int) -> Tensor:
    """bool [V, V] over valid tokens: True where the query (row) may see the key (column), pair by pair."""
    segments = [segment for segment, length in enumerate(sequence.lengths) for _ in range(length)]
    return torch.tensor(
        [
            [segments[q] == segments[k] and k <= q and (window == 0 or q - k < window) for k in range(len(segments))]
            for q in range(len(segments))
        ],
        dtype=torch.bool,
    ).reshape(len(segments), len(segments))
