"""The role ``attention``: what every kernel of packed attention is called with, and what they share.

A kernel computes causal attention inside each segment. Padding is cut off before the kernel and comes back as zeros, so
its rows, whatever they hold, reach no product, and their gradients are zeros. Who builds the metadata, and when, is the
layers' business.

Shape suffixes: T tokens, V valid tokens, H query heads, G kv heads, C head dim, Q query heads per kv head, n segments
of one batch, L their length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_glue.ops.dropout import derive_seed, keep_mask, position_keys


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout on attention probabilities, as a function of global positions.

    Attributes:
        probability: Of dropping, above 0 and below 1.
        seed: One per (run seed, step, micro-batch, layer).
        first_head: Global index of the first query head at hand.
        first_token: Index in the whole micro-batch of the first token at hand.
    """

    probability: float
    seed: int
    first_head: int = 0
    first_token: int = 0


class AttentionKernel(Protocol):
    """Packed causal attention."""

    def __call__(
        self,
        q_THC: Tensor,
        k_TGC: Tensor,
        v_TGC: Tensor,
        metadata: Any,
        *,
        window: int,
        scale: float,
        dropout: AttentionDropout | None,
    ) -> Tensor:
        """Attend.

        Args:
            q_THC: Queries.
            k_TGC: Keys; query head h reads kv head h // (H / G).
            v_TGC: Values.
            metadata: Of the kernel's own layout, from ``attention_metadata.py``.
            window: Tokens that a query sees, itself included; 0 for all before it.
            scale: Factor on the scores.
            dropout: ``None`` for none.

        Returns:
            [T, H, C]; zeros for padding.
        """
        ...


def cut_padding(x_TXC: Tensor, num_valid_tokens: int) -> Tensor:
    """Return the rows of live segments; their gradient reaches ``x_TXC`` with zeros for the rest."""
    return x_TXC if x_TXC.shape[0] == num_valid_tokens else x_TXC[:num_valid_tokens]


def attend_to_nothing(q_0HC: Tensor, k_0GC: Tensor, v_0GC: Tensor) -> Tensor:
    """Return the output of no tokens, whose gradients are zeros for all three.

    The queries alone would do for the value, but what feeds keys and values alone, such as the norm of the keys, would
    then get no gradient at all, and the engines that reduce gradients expect one from every rank.

    Args:
        q_0HC: No queries.
        k_0GC: No keys.
        v_0GC: No values.

    Returns:
        [0, H, C].
    """
    return q_0HC + (k_0GC.sum() + v_0GC.sum())


def restore_padding(out_VHC: Tensor, num_tokens: int) -> Tensor:
    """Append zero rows up to ``num_tokens``."""
    num_pad_tokens = num_tokens - out_VHC.shape[0]
    return out_VHC if num_pad_tokens == 0 else F.pad(out_VHC, (0, 0, 0, 0, 0, num_pad_tokens))


def explicit_attention(
    qkv: tuple[Tensor, Tensor, Tensor],
    allowed_LL: Tensor,
    tokens_nL: Tensor,
    scale: float,
    dropout: AttentionDropout,
) -> Tensor:
    """Attention written out, with a dropout mask that depends on (head, query token, key token) alone.

    So the mask is the same in every layout, in recompute, and on a rank that holds a part of the heads or tokens.

    Args:
        qkv: q [n, H, L, C], k and v [n, G, L, C].
        allowed_LL: bool, True where the query (row) may see the key.
        tokens_nL: Index in the micro-batch of each row.
        scale: Factor on the scores.
        dropout: What to drop.

    Returns:
        [n, H, L, C].
    """
    q_nHLC, k_nGLC, v_nGLC = qkv
    num_heads, num_groups = q_nHLC.shape[1], k_nGLC.shape[1]
    q_nGQLC = q_nHLC.unflatten(1, (num_groups, num_heads // num_groups))
    scores_nGQLL = (q_nGQLC @ k_nGLC.unsqueeze(2).transpose(-1, -2)) * scale
    probs_nGQLL = torch.softmax(scores_nGQLL.masked_fill(~allowed_LL, float("-inf")).float(), dim=-1)
    keep_nHLL = kept_probabilities(dropout, num_heads, tokens_nL, tokens_nL)
    probs_nGQLL = probs_nGQLL * keep_nHLL.view(probs_nGQLL.shape) * (1.0 / (1.0 - dropout.probability))
    return (probs_nGQLL.to(v_nGLC.dtype) @ v_nGLC.unsqueeze(2)).flatten(1, 2)


def kept_probabilities(
    dropout: AttentionDropout, num_heads: int, query_tokens_nL: Tensor, key_tokens_nK: Tensor
) -> Tensor:
    """Return which attention probabilities survive, by (head, query token, key token) alone.

    Args:
        dropout: What to drop.
        num_heads: Query heads at hand.
        query_tokens_nL: Index of each query in the tokens that ``dropout.first_token`` counts from.
        key_tokens_nK: Index of each key likewise.

    Returns:
        bool [n, H, L, K].
    """
    query_tokens_nL, key_tokens_nK = query_tokens_nL + dropout.first_token, key_tokens_nK + dropout.first_token
    row_keys_nHL = torch.stack(
        [
            position_keys(query_tokens_nL, derive_seed(dropout.seed, 0, dropout.first_head + head))
            for head in range(num_heads)
        ],
        dim=1,
    )
    column_keys_nK = position_keys(key_tokens_nK, derive_seed(dropout.seed, 1))
    return keep_mask(row_keys_nHL[..., None], column_keys_nK[:, None, None], dropout.probability)
