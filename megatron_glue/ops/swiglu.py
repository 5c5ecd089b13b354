"""SwiGLU on a fused gate/up product, with a backward that recomputes instead of keeping intermediates.

silu(gate) * up (Shazeer 2020, "GLU Variants Improve Transformer"). Plain autograd keeps silu(gate) and makes four
passes over new memory; this keeps only its input and writes both gradients into one buffer.

Stands between the two products of a feed-forward layer.

Shape suffixes: N rows, F ffn width, G = 2 * F.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up_NG: Tensor) -> Tensor:
    """Return silu(gate) * up.

    Args:
        gate_up_NG: [..., 2F]; gates are the first half of the last dim. Floating point.

    Returns:
        [..., F], same dtype.
    """
    return _SwiGLU.apply(gate_up_NG)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_NG: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_NG)
        gate_NF, up_NF = gate_up_NG.chunk(2, dim=-1)
        return F.silu(gate_NF).mul_(up_NF)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (gate_up_NG,) = ctx.saved_tensors
        gate_NF, up_NF = gate_up_NG.chunk(2, dim=-1)
        grad_NG = torch.empty_like(gate_up_NG)
        grad_gate_NF, grad_up_NF = grad_NG.chunk(2, dim=-1)
        torch.mul(F.silu(gate_NF), grad_outputs[0], out=grad_up_NF)
        torch.ops.aten.silu_backward.grad_input(grad_outputs[0] * up_NF, gate_NF, grad_input=grad_gate_NF)
        return grad_NG
