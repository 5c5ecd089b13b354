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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_glue.ops.matmul import TORCH_MATMUL, MatMul
from megatron_glue.ops.softmax import softmax_and_log_sum
from megatron_glue.types import IGNORE_LABEL


@dataclass(frozen=True, eq=False)
class LossChunks:
    """How a loss is computed piece by piece.

    Attributes:
        vocab_size: Real entries of the vocabulary.
        chunk_tokens: Tokens whose logits exist at once.
        matmul: Computes the products.

    Raises:
        ValueError: If ``chunk_tokens`` is not positive.
    """

    vocab_size: int
    chunk_tokens: int
    matmul: MatMul = TORCH_MATMUL

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={self.chunk_tokens}: must be at least 1")

    def rows(self, num_tokens: int) -> Iterator[slice]:
        """Yield the rows of each chunk."""
        for start in range(0, num_tokens, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, num_tokens))


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    chunks: LossChunks,
    bias_V: Tensor | None = None,
) -> Tensor:
    """Sum of -log softmax(x W^T + b)[label] over all labelled tokens.

    Args:
        x_TD: Hidden states.
        weight_VD: Output weight; rows from ``vocab_size`` on are padding of the vocabulary: they take no part and get
            zero gradients. In another dtype than ``x_TD``, it is cast for the products and gets its gradient unrounded.
        labels_T: int64. ``IGNORE_LABEL`` rows contribute nothing.
        chunks: Real entries of the vocabulary, at most V, and how many tokens at once.
        bias_V: Bias of the output layer.

    Returns:
        fp32 scalar (fp64 for fp64 input).

    Raises:
        ValueError: If ``vocab_size`` exceeds the rows of the weight.
    """
    vocab_size, num_rows = chunks.vocab_size, weight_VD.shape[0]
    if not 1 <= vocab_size <= num_rows:
        raise ValueError(f"vocab_size={vocab_size}: must lie between 1 and the {num_rows} rows of the weight")
    tensors = (x_TD, weight_VD, bias_V)
    needs_grad = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return _LinearCrossEntropy.apply(x_TD, weight_VD, bias_V, labels_T, chunks, needs_grad)


def _losses(logits_tv: Tensor, label_t1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each token [t, 1] and the softmax."""
    softmax_tv, largest_t1, log_sum_t1 = softmax_and_log_sum(logits_tv)
    return largest_t1 - logits_tv.gather(1, label_t1) + log_sum_t1, softmax_tv


class _Gradients:
    """Buffers that the chunks fill.

    Args:
        x_TD: Hidden states.
        weight_VD: Output weight.
        bias_V: Bias or ``None``.
        chunks: Settings.
    """

    def __init__(self, x_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, chunks: LossChunks) -> None:
        sums = {"dtype": torch.promote_types(x_TD.dtype, torch.float32), "device": weight_VD.device}
        self.x_TD = torch.empty_like(x_TD)
        # Transposed: the operand that a product may have to copy is then the narrow one.
        self.weight_Dv = torch.zeros(weight_VD.shape[1], chunks.vocab_size, **sums)
        self.bias_v = None if bias_V is None else torch.zeros(chunks.vocab_size, **sums)
        self._matmul = chunks.matmul

    def add(self, rows: slice, x_tD: Tensor, grad_tv: Tensor, weight_vD: Tensor) -> None:
        """Add one chunk; ``grad_tv`` is the gradient of its logits."""
        if self.bias_v is not None:
            self.bias_v += grad_tv.sum(0)
        grad_tv = grad_tv.to(x_tD.dtype)
        self.x_TD[rows] = self._matmul.nn(grad_tv, weight_vD)
        self._matmul.add_tn_(self.weight_Dv, x_tD, grad_tv)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        chunks: LossChunks,
        needs_grad: bool,
    ) -> Tensor:
        vocab_size = chunks.vocab_size
        weight_vD = weight_VD[:vocab_size].to(x_TD.dtype)
        loss_dtype = torch.promote_types(x_TD.dtype, torch.float32)
        loss_sum = torch.zeros((), dtype=loss_dtype, device=x_TD.device)
        gradients = _Gradients(x_TD, weight_VD, bias_V, chunks) if needs_grad else None
        is_ignored_T1 = (labels_T == IGNORE_LABEL)[:, None]
        label_T1 = labels_T[:, None].masked_fill(is_ignored_T1, 0)
        for rows in chunks.rows(x_TD.shape[0]):
            x_tD, label_t1, is_ignored_t1 = x_TD[rows], label_T1[rows], is_ignored_T1[rows]
            logits_tv = chunks.matmul.nt(x_tD, weight_vD).to(loss_dtype)
            if bias_V is not None:
                logits_tv += bias_V[:vocab_size].to(loss_dtype)
            loss_t1, softmax_tv = _losses(logits_tv, label_t1)
            del logits_tv
            loss_sum += loss_t1.masked_fill_(is_ignored_t1, 0.0).sum()
            if gradients is None:
                continue
            # d loss / d logits = softmax - one_hot(label), zero where there is no label.
            softmax_tv.scatter_add_(1, label_t1, softmax_tv.new_full((), -1.0).expand(label_t1.shape))
            gradients.add(rows, x_tD, softmax_tv.masked_fill_(is_ignored_t1, 0.0), weight_vD)
        if gradients is not None:
            ctx.has_bias, ctx.num_rows = bias_V is not None, weight_VD.shape[0]
            kept = (gradients.x_TD, gradients.weight_Dv, gradients.bias_v)
            ctx.save_for_backward(*(tensor for tensor in kept if tensor is not None))
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        grad_x_TD, grad_Dv, *grad_bias_v = ctx.saved_tensors
        width, vocab_size = grad_Dv.shape
        num_pad_rows = ctx.num_rows - vocab_size
        grad_weight_VD = grad_Dv.new_empty(ctx.num_rows, width)
        torch.mul(grad_Dv.t(), scale, out=grad_weight_VD[:vocab_size])
        grad_weight_VD[vocab_size:] = 0.0
        grad_bias_V = F.pad(grad_bias_v[0] * scale, (0, num_pad_rows)) if ctx.has_bias else None
        return grad_x_TD * scale.to(grad_x_TD.dtype), grad_weight_VD, grad_bias_V, None, None, None
