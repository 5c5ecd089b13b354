"""Output projection and cross-entropy together, in chunks of tokens, so that the full logits never exist.

With a vocabulary of 128k, the logits of 8192 tokens in fp32 take 4 GiB, and their gradient as much again. Here a chunk
of logits is made, turned into its own gradient in place, multiplied into the gradients of input and weight, and
dropped. Everything that backward needs is therefore ready after forward; backward only scales it. (Method: Wijmans et
al. 2024, "Cut Your Losses"; Hsu et al. 2024, "Liger Kernel".)

The end of a batch's way. It returns the SUM of the losses; dividing by the tokens of the optimizer step is the caller's
business.

Shape suffixes: T tokens, D model, V vocabulary (padded), t tokens of one chunk, v real vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_glue.types import IGNORE_LABEL


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int,
    bias_V: Tensor | None = None,
) -> Tensor:
    """Sum of -log softmax(x W^T + b)[label] over all labelled tokens.

    Args:
        x_TD: Hidden states.
        weight_VD: Output weight; rows from ``vocab_size`` on are padding of the vocabulary: they take no part and get
            zero gradients. In another dtype than ``x_TD``, it is cast for the products and gets its gradient unrounded.
        labels_T: int64. ``IGNORE_LABEL`` rows contribute nothing.
        vocab_size: Real entries of the vocabulary, at most V.
        chunk_tokens: Tokens whose logits exist at once.
        bias_V: Bias of the output layer.

    Returns:
        fp32 scalar (fp64 for fp64 input).

    Raises:
        ValueError: If ``vocab_size`` exceeds the rows of the weight or ``chunk_tokens`` is not positive.
    """
    if not 1 <= vocab_size <= weight_VD.shape[0]:
        raise ValueError(f"vocab_size={vocab_size}: must lie between 1 and the {weight_VD.shape[0]} rows of the weight")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: must be at least 1")
    tensors = (x_TD, weight_VD, bias_V)
    needs_grad = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return _LinearCrossEntropy.apply(x_TD, weight_VD, bias_V, labels_T, vocab_size, chunk_tokens, needs_grad)


class _Gradients:
    """Buffers that the chunks fill.

    Args:
        x_TD: Hidden states.
        weight_VD: Output weight.
        bias_V: Bias or ``None``.
        vocab_size: v.
    """

    def __init__(self, x_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, vocab_size: int) -> None:
        accumulate = torch.promote_types(x_TD.dtype, torch.float32)
        self.x_TD = torch.empty_like(x_TD)
        self.weight_VD = torch.zeros(weight_VD.shape, dtype=accumulate, device=weight_VD.device)
        self.bias_V = None if bias_V is None else torch.zeros(bias_V.shape, dtype=accumulate, device=bias_V.device)
        self._vocab_size = vocab_size

    def add(self, rows: slice, x_tD: Tensor, grad_tv: Tensor, weight_vD: Tensor) -> None:
        """Add one chunk; ``grad_tv`` is the gradient of its logits."""
        if self.bias_V is not None:
            self.bias_V[: self._vocab_size] += grad_tv.sum(0)
        grad_tv = grad_tv.to(x_tD.dtype)
        torch.mm(grad_tv, weight_vD, out=self.x_TD[rows])
        grad_vD = self.weight_VD[: self._vocab_size]
        if grad_vD.dtype == x_tD.dtype:
            grad_vD.addmm_(grad_tv.t(), x_tD)
        else:
            grad_vD += grad_tv.t() @ x_tD


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        vocab_size: int,
        chunk_tokens: int,
        needs_grad: bool,
    ) -> Tensor:
        weight_vD = weight_VD[:vocab_size].to(x_TD.dtype)
        loss_dtype = torch.promote_types(x_TD.dtype, torch.float32)
        loss_sum = torch.zeros((), dtype=loss_dtype, device=x_TD.device)
        gradients = _Gradients(x_TD, weight_VD, bias_V, vocab_size) if needs_grad else None
        is_ignored_T1 = (labels_T == IGNORE_LABEL)[:, None]
        label_T1 = labels_T[:, None].masked_fill(is_ignored_T1, 0)
        for start in range(0, x_TD.shape[0], chunk_tokens):
            rows = slice(start, min(start + chunk_tokens, x_TD.shape[0]))
            x_tD, label_t1, is_ignored_t1 = x_TD[rows], label_T1[rows], is_ignored_T1[rows]
            logits_tv = (x_tD @ weight_vD.t()).to(loss_dtype)
            if bias_V is not None:
                logits_tv += bias_V[:vocab_size].to(loss_dtype)
            log_probs_tv = torch.log_softmax(logits_tv, dim=1)
            del logits_tv
            loss_sum -= log_probs_tv.gather(1, label_t1).masked_fill_(is_ignored_t1, 0.0).sum()
            if gradients is None:
                continue
            # d loss / d logits = softmax - one_hot(label), zero where there is no label.
            grad_tv = log_probs_tv.exp_()
            grad_tv.scatter_add_(1, label_t1, grad_tv.new_full((), -1.0).expand(label_t1.shape))
            gradients.add(rows, x_tD, grad_tv.masked_fill_(is_ignored_t1, 0.0), weight_vD)
        if gradients is not None:
            ctx.has_bias = bias_V is not None
            kept = (gradients.x_TD, gradients.weight_VD, gradients.bias_V)
            ctx.save_for_backward(*(tensor for tensor in kept if tensor is not None))
        return loss_sum

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        saved = ctx.saved_tensors
        grad_bias_V = saved[2] * scale if ctx.has_bias else None
        return saved[0] * scale.to(saved[0].dtype), saved[1] * scale, grad_bias_V, None, None, None, None
