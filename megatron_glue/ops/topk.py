"""Top-k along the last dim with a defined answer on ties: the lower index wins, on every device and in every run.

``torch.topk`` leaves the order of equal values open, and CPU and GPU kernels use that freedom differently. A router
that lets it decide sends tied tokens to different experts on different machines, or in the recompute of one machine.

It stands inside the router of every MoE layer, between scores and :func:`megatron_glue.ops.grouping.group_tokens`.

Shape suffixes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor


def topk_lowest_index(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Choose the k largest scores of each row, value descending, equal values by lower index.

    Each score and its column become one int64 key: the score's bits, mapped so that integer order is float order, above
    the column counted backwards. Keys of a row are all different, so ``torch.topk`` on them has one right answer.

    Args:
        scores_TE: [T, E] floating point; compared as fp32 (a float64 loses digits here, bf16 and fp16 none). NaN ranks
            above infinity or, with its sign bit set, below -infinity.
        k: Choices per row, 1 <= k <= E.

    Returns:
        values_TK: The chosen scores in their own dtype, differentiable with respect to ``scores_TE``.
        ids_TK: int64 column indices.

    Raises:
        ValueError: If k does not lie between 1 and E.
    """
    num_columns = scores_TE.shape[-1]
    if not 1 <= k <= num_columns:
        raise ValueError(f"k={k}: must lie between 1 and the {num_columns} columns")
    # Adding zero turns -0.0 into 0.0; the two are equal and must tie.
    bits_TE = (scores_TE.detach().float() + 0.0).view(torch.int32)
    # Negative floats order backwards when read as integers: flip all their bits but the sign.
    bits_TE = bits_TE ^ ((bits_TE >> 31) & 0x7FFFFFFF)
    columns_E = torch.arange(num_columns - 1, -1, -1, device=scores_TE.device)
    keys_TE = bits_TE.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(columns_E)
    ids_TK = keys_TE.topk(k, dim=-1).indices
    return scores_TE.gather(-1, ids_TK), ids_TK
