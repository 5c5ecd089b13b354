"""Matrix products of two dims, as the hand-written backward passes need them, and the linear map over them.

Which library multiplies is the choice of a backend: layers get a :class:`MatMul` and use nothing else. torch's own is
here, because it is the oracle and needs no library.

Stands under every product of a layer and of the loss. It splits nothing over ranks (``parallel/tensor.py`` does).

Shape suffixes: M rows, N columns, K what is summed over; T tokens, I input width, O output width.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class MatMul(Protocol):
    """The role ``matmul``: products without autograd, operands of any strides."""

    def nt(self, a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Return ``a @ b^T + bias``, [M, N]."""
        ...

    def nn(self, a_MK: Tensor, b_KN: Tensor) -> Tensor:
        """Return ``a @ b``, [M, N]."""
        ...

    def tn(self, a_KM: Tensor, b_KN: Tensor) -> Tensor:
        """Return ``a^T @ b``, [M, N]."""
        ...

    def add_tn_(self, sum_MN: Tensor, a_KM: Tensor, b_KN: Tensor) -> None:
        """Add ``a^T @ b`` in the dtype of the sum, in place."""
        ...


class TorchMatMul:
    """torch's own products. See :class:`MatMul`."""

    def nt(self, a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """See :class:`MatMul`."""
        return F.linear(a_MK, b_NK, bias_N)

    def nn(self, a_MK: Tensor, b_KN: Tensor) -> Tensor:
        """See :class:`MatMul`."""
        return a_MK @ b_KN

    def tn(self, a_KM: Tensor, b_KN: Tensor) -> Tensor:
        """See :class:`MatMul`."""
        return a_KM.t() @ b_KN

    def add_tn_(self, sum_MN: Tensor, a_KM: Tensor, b_KN: Tensor) -> None:
        """See :class:`MatMul`."""
        if sum_MN.dtype == a_KM.dtype:
            sum_MN.addmm_(a_KM.t(), b_KN)
        else:
            sum_MN += a_KM.t() @ b_KN


TORCH_MATMUL: MatMul = TorchMatMul()


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, matmul: MatMul) -> Tensor:
    """Multiply rows by a weight, differentiably.

    Args:
        x_TI: Rows.
        weight_OI: Weight, in the dtype of ``x_TI``.
        bias_O: Bias or ``None``.
        matmul: Computes the product and those of its gradients.

    Returns:
        [T, O].
    """
    if matmul is TORCH_MATMUL:
        return F.linear(x_TI, weight_OI, bias_O)
    return _Linear.apply(x_TI, weight_OI, bias_O, matmul)


def is_asked_for(ctx: Any, index: int) -> bool:
    """Whether the present backward pass wants the gradient of an argument with none but tensors before it.

    ``needs_input_grad`` speaks of the graph, not of the pass: a zero-bubble pipeline runs one pass for the gradients of
    inputs and a later one for those of weights, and each would compute both.

    Args:
        ctx: Of an autograd Function, in its backward.
        index: Place of the argument in its forward.
    """
    if not ctx.needs_input_grad[index]:
        return False
    node = ctx.next_functions[index][0]
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # Raised for a leaf whose gradient autograd.grad() is asked for.
        return True


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, matmul: MatMul) -> Tensor:
        ctx.matmul = matmul
        ctx.save_for_backward(x_TI, weight_OI)
        return matmul.nt(x_TI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        matmul: MatMul = ctx.matmul
        (grad_TO,) = grad_outputs
        x_TI, weight_OI = ctx.saved_tensors
        return (
            matmul.nn(grad_TO, weight_OI) if is_asked_for(ctx, 0) else None,
            matmul.tn(grad_TO, x_TI) if is_asked_for(ctx, 1) else None,
            grad_TO.sum(0) if is_asked_for(ctx, 2) else None,
            None,
        )
