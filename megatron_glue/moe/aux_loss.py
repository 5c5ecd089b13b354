"""Losses that keep a router balanced and its logits small, and how they enter backward.

Each is computed per MoE layer from that layer's own statistics: averaging over layers first would hide opposite
imbalances. Each is a mean over the tokens of a micro-batch, so its size does not depend on the batch. Where several
ranks hold rows of one micro-batch, every function here gives this rank's SHARE: its rows, divided by the tokens of the
whole micro-batch and weighed by the counts of the whole. The sum of the shares is the loss, and the sum of their
gradients is its gradient. The losses enter backward beside the model's loss, not through it: :func:`attach_losses` ties
them to the layer's output.

This file chooses no expert, talks to no rank and keeps no state. It stands behind the router, once per layer and
micro-batch.

Shape suffixes: T tokens of this rank, D model, E experts, K top-k, S segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_glue.ops.grouping import count_ids


def load_balancing_loss(prob_sums_E: Tensor, counts_E: Tensor, top_k: int, num_tokens: int) -> Tensor:
    """Balance over all tokens of a micro-batch: E * sum_e f_e * P_e.

    f_e is the share of (token, choice) pairs that went to expert e and P_e its mean probability (Fedus et al. 2021,
    "Switch Transformers", eq. 4; Lepikhin et al. 2020, "GShard"). With shares over T*K pairs the value is 1 under
    perfect balance for every K. The gradient flows through P only.

    Args:
        prob_sums_E: fp32 router probabilities, each row of which sums to 1, added up over this rank's tokens.
        counts_E: int64 pairs of each expert in the whole micro-batch.
        top_k: K.
        num_tokens: Tokens of the whole micro-batch (host integer).

    Returns:
        fp32 scalar: this rank's share; 0 without tokens.
    """
    if num_tokens == 0:
        return prob_sums_E.sum()
    num_experts = prob_sums_E.shape[0]
    return torch.dot(prob_sums_E, counts_E.to(prob_sums_E.dtype)) * (num_experts / (num_tokens**2 * top_k))


def count_by_document(expert_ids_TK: Tensor, segment_ids_T: Tensor, num_segments: int, num_experts: int) -> Tensor:
    """Count the pairs of each document and expert.

    Args:
        expert_ids_TK: int64 chosen experts.
        segment_ids_T: Integer document of each token, in [0, num_segments).
        num_segments: S (host integer).
        num_experts: E.

    Returns:
        int64 [S, E].
    """
    ids_TK = segment_ids_T.to(torch.int64)[:, None] * num_experts + expert_ids_TK
    return count_ids(ids_TK, num_segments * num_experts).view(num_segments, num_experts)


def document_balancing_loss(probs_TE: Tensor, counts_SE: Tensor, segment_ids_T: Tensor, num_tokens: int) -> Tensor:
    """Balance inside each document: the mean over documents, weighted by their tokens, of E * sum_e f_e * P_e.

    The sequence-wise loss of DeepSeek-V3 (2024, section 2.1.2), K-normalised as :func:`load_balancing_loss`. The weight
    makes every token count alike, whatever documents it was packed with.

    Args:
        probs_TE: fp32 router probabilities; each row sums to 1.
        counts_SE: int64 pairs of each document and expert in the whole micro-batch, see :func:`count_by_document`.
        segment_ids_T: Integer document of each token, in [0, S).
        num_tokens: Tokens of the whole micro-batch (host integer).

    Returns:
        fp32 scalar: this rank's share; 0 without tokens.
    """
    if num_tokens == 0:
        return probs_TE.sum()
    counts_SE = counts_SE.to(probs_TE.dtype)
    share_SE = counts_SE / counts_SE.sum(1, keepdim=True)
    share_TE = share_SE.index_select(0, segment_ids_T.to(torch.int64))
    return (probs_TE * share_TE).sum() * (probs_TE.shape[1] / num_tokens)


def z_loss(log_sum_exp_T: Tensor, num_tokens: int) -> Tensor:
    """Mean square of the logits' log-sum-exp, which keeps them small (Zoph et al. 2022, "ST-MoE", eq. 5).

    Args:
        log_sum_exp_T: fp32 log(sum(exp(logits))) of each of this rank's tokens.
        num_tokens: Tokens of the whole micro-batch (host integer).

    Returns:
        fp32 scalar: this rank's share; 0 without tokens.
    """
    return log_sum_exp_T.square().sum() / max(1, num_tokens)


def attach_losses(x_TD: Tensor, loss: Tensor, scale: float) -> Tensor:
    """Return ``x_TD`` unchanged; its backward also sends ``scale`` into ``loss``.

    The pipeline can then carry activations only, and every layer's loss still reaches its router.

    Args:
        x_TD: An activation that the model's loss depends on.
        loss: Scalar, coefficients included.
        scale: Factor on its gradient (host number).

    Returns:
        A view of ``x_TD``.
    """
    return _AttachLosses.apply(x_TD, loss, scale)


class _AttachLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.loss_dtype = scale, loss.dtype
        return x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_TD = grad_outputs[0]
        return grad_TD, torch.full((), ctx.scale, dtype=ctx.loss_dtype, device=grad_TD.device), None
