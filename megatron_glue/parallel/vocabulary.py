"""The vocabulary split over tensor-parallel ranks: lookup, loss and logits.

Each rank holds V / P rows of the embedding and of the output weight, and the fewer real ones among them. A lookup of an
id that lives elsewhere is zero; the sum over ranks is the row. The loss is that of ``ops/cross_entropy.py``, with each
rank making its own columns of a chunk of logits: what the ranks tell each other about a chunk are three numbers per
token (largest logit, sum of exponentials, logit of the label), in one gather. Backward needs no exchange.

Stands at the start and at the end of a batch's way.

Shape suffixes: T tokens, S rows on this rank (T / P with sequence parallelism, else T), D model, V rows of the
vocabulary on this rank, v real ones among them, t tokens of one chunk, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_glue.ops.cross_entropy import LossChunks
from megatron_glue.parallel.collectives import start_all_gather_rows
from megatron_glue.parallel.tensor import TensorParallel, gather_rows, reduce_rows, start_sum_into_stream
from megatron_glue.types import IGNORE_LABEL


def num_real_rows(num_rows: int, vocab_size: int, tp: TensorParallel) -> int:
    """How many of this rank's rows of the padded vocabulary are real entries; 0 on a rank that holds only padding."""
    return min(max(vocab_size - tp.rank * num_rows, 0), num_rows)


def vocab_parallel_embedding(input_ids_T: Tensor, weight_VD: Tensor, dtype: torch.dtype, tp: TensorParallel) -> Tensor:
    """Look token ids up.

    Args:
        input_ids_T: int64 ids of all tokens.
        weight_VD: This rank's rows.
        dtype: Of the result, and of what travels.
        tp: The ranks.

    Returns:
        [S, D]: this rank's rows of the stream (sequence parallelism), else all.
    """
    num_rows = weight_VD.shape[0]
    local_ids_T = input_ids_T - tp.rank * num_rows
    is_elsewhere_T = (local_ids_T < 0) | (local_ids_T >= num_rows)
    rows_TD = F.embedding(local_ids_T.masked_fill(is_elsewhere_T, 0), weight_VD).to(dtype)
    # The sum over ranks adds zeros to one row: exact in every dtype.
    return reduce_rows(rows_TD.masked_fill(is_elsewhere_T[:, None], 0.0), tp)


@torch.no_grad()
def vocab_parallel_logits(x_SD: Tensor, weight_VD: Tensor, row: int, vocab_size: int, tp: TensorParallel) -> Tensor:
    """Logits of one token, for sampling.

    Args:
        x_SD: What this rank holds of the stream.
        weight_VD: This rank's rows of the output weight, in the dtype of ``x_SD``.
        row: Index of the token among all T.
        vocab_size: Real entries of the whole vocabulary.
        tp: The ranks.

    Returns:
        fp32 [vocab_size], bit-equal on every rank.
    """
    logits_V = weight_VD @ gather_rows(x_SD, tp)[row]
    return start_all_gather_rows(logits_V.float(), tp.group).wait()[:vocab_size]


def vocab_parallel_linear_cross_entropy(
    x_SD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunks: LossChunks, tp: TensorParallel
) -> Tensor:
    """Sum of -log softmax(x W^T)[label] over all labelled tokens, without full logits on any rank.

    Every rank returns the whole sum and calls backward on its own copy of it, with the same factor. The gradient of the
    weight is then that of this rank's rows, whole, and that of ``x_SD`` is summed over ranks once, in forward: whole
    rows of this rank (sequence parallelism), else all rows, the same on every rank. Nothing comes out P times.

    Args:
        x_SD: What this rank holds of the stream.
        weight_VD: This rank's rows of the output weight; rows of entries from ``vocab_size`` on take no part and get
            zero gradients. In another dtype than ``x_SD``, it is cast for the products and gets its gradient unrounded.
        labels_T: int64 labels of all tokens. ``IGNORE_LABEL`` rows contribute nothing.
        chunks: Real entries of the whole vocabulary, which may end inside any rank's rows, and how many tokens at once.
        tp: The ranks.

    Returns:
        fp32 scalar (fp64 for fp64 input), bit-equal on every rank.

    Raises:
        ValueError: If ``vocab_size`` exceeds the rows of all ranks.
    """
    num_rows, vocab_size = weight_VD.shape[0], chunks.vocab_size
    if not 1 <= vocab_size <= num_rows * tp.size:
        raise ValueError(f"vocab_size={vocab_size}: must lie between 1 and {tp.size} x {num_rows} rows")
    needs_grad = torch.is_grad_enabled() and (x_SD.requires_grad or weight_VD.requires_grad)
    return _VocabParallelCrossEntropy.apply(x_SD, weight_VD, labels_T, chunks, _Ranks(tp, needs_grad))


@dataclass(frozen=True, eq=False)
class _Ranks:
    """What the ranks of one call tell each other about a chunk."""

    tp: TensorParallel
    needs_grad: bool

    def losses(self, logits_tv: Tensor, label_t: Tensor, is_elsewhere_t: Tensor) -> tuple[Tensor, Tensor]:
        """Turn logits into losses, and in place into softmax.

        Args:
            logits_tv: This rank's columns, fp32.
            label_t: Column of the label; any column where it is not here.
            is_elsewhere_t: bool, the label is none of these columns.

        Returns:
            Loss of each token [t], and ``logits_tv`` overwritten by this rank's columns of the softmax.
        """
        label_logit_t = _column_of(logits_tv, label_t).masked_fill(is_elsewhere_t, 0.0)
        if logits_tv.shape[1]:
            largest_t = logits_tv.amax(dim=1)
            exp_tv = logits_tv.sub_(largest_t[:, None]).exp_()
        else:
            largest_t = torch.full_like(label_logit_t, float("-inf"))
            exp_tv = logits_tv
        own_1t3 = torch.stack((largest_t, exp_tv.sum(dim=1), label_logit_t), dim=1)[None]
        # One gather, and the same order of additions on every rank: the losses are bit-equal.
        largest_Pt, sum_Pt, label_logit_Pt = start_all_gather_rows(own_1t3, self.tp.group).wait().unbind(dim=2)
        top_t = largest_Pt.amax(dim=0)
        total_t = (sum_Pt * (largest_Pt - top_t).exp()).sum(dim=0)
        loss_t = total_t.log() + top_t - label_logit_Pt.sum(dim=0)
        if self.needs_grad:
            exp_tv *= ((largest_t - top_t).exp() / total_t)[:, None]
        return loss_t, exp_tv


def _column_of(logits_tv: Tensor, label_t: Tensor) -> Tensor:
    """One element of each row; zeros if there are no columns."""
    if logits_tv.shape[1] == 0:
        return logits_tv.new_zeros(logits_tv.shape[0])
    return logits_tv.gather(1, label_t[:, None]).squeeze(1)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_SD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunks: LossChunks, ranks: _Ranks
    ) -> Tensor:
        tp, needs_grad = ranks.tp, ranks.needs_grad
        num_rows = weight_VD.shape[0]
        num_real = num_real_rows(num_rows, chunks.vocab_size, tp)
        # Gathered anew where it is needed and dropped: this rank's gradient is all that outlives forward.
        x_TD = gather_rows(x_SD, tp)
        weight_vD = weight_VD[:num_real].to(x_TD.dtype)
        loss_dtype = torch.promote_types(x_TD.dtype, torch.float32)
        loss_sum = torch.zeros((), dtype=loss_dtype, device=x_TD.device)
        is_ignored_T = labels_T == IGNORE_LABEL
        label_T = labels_T - tp.rank * num_rows
        is_elsewhere_T = is_ignored_T | (label_T < 0) | (label_T >= num_real)
        label_T = label_T.masked_fill(is_elsewhere_T, 0)
        grad_x_TD = torch.empty_like(x_TD) if needs_grad else None
        grad_weight_VD = torch.zeros(weight_VD.shape, dtype=loss_dtype, device=x_TD.device) if needs_grad else None
        summing = None
        for rows in chunks.rows(x_TD.shape[0]):
            x_tD = x_TD[rows]
            logits_tv = chunks.matmul.nt(x_tD, weight_vD).to(loss_dtype)
            loss_t, softmax_tv = ranks.losses(logits_tv, label_T[rows], is_elsewhere_T[rows])
            loss_sum += loss_t.masked_fill_(is_ignored_T[rows], 0.0).sum()
            if grad_x_TD is None or grad_weight_VD is None:
                continue
            grad_tv = _softmax_to_gradient(softmax_tv, label_T[rows], is_elsewhere_T[rows], is_ignored_T[rows])
            grad_tv = grad_tv.to(x_tD.dtype)
            grad_x_TD[rows] = chunks.matmul.nn(grad_tv, weight_vD)
            if rows.stop == x_TD.shape[0]:
                summing = start_sum_into_stream(grad_x_TD, tp)
            chunks.matmul.add_tn_(grad_weight_VD[:num_real], grad_tv, x_tD)
        if grad_x_TD is not None:
            ctx.save_for_backward(grad_x_TD if summing is None else summing.wait(), grad_weight_VD)
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        grad_x_SD, grad_weight_VD = ctx.saved_tensors
        return grad_x_SD * scale.to(grad_x_SD.dtype), grad_weight_VD * scale, None, None, None


def _softmax_to_gradient(softmax_tv: Tensor, label_t: Tensor, is_elsewhere_t: Tensor, is_ignored_t: Tensor) -> Tensor:
    """In place: softmax - one_hot(label), zero where there is no label."""
    if softmax_tv.shape[1]:
        minus_one_t1 = (~is_elsewhere_t[:, None]).to(softmax_tv.dtype).neg_()
        softmax_tv.scatter_add_(1, label_t[:, None], minus_one_t1)
    return softmax_tv.masked_fill_(is_ignored_t[:, None], 0.0)
