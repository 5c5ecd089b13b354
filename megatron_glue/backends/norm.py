"""Kernels of the role ``norm``.

``rms_norm_torch`` and ``layer_norm_torch`` are torch's own. ``rms_norm_cpu`` exists because torch 2.13 has no fused
backward of RMSNorm on a CPU: it borrows the one of LayerNorm, which needs one pass over the rows. With a mean of zero
the two differ only by the gradient through the mean:

    d_x(RMS) = d_x(Layer, mean = 0) + rstd * mean(grad * weight)

Shape suffixes: D normalised width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNormKernel(Protocol):
    """RMSNorm (Zhang and Sennrich 2019)."""

    def __call__(self, x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        """Return x / sqrt(mean(x^2) + epsilon) * weight over the last dim; same shape and dtype as ``x``."""
        ...


class LayerNormKernel(Protocol):
    """LayerNorm (Ba et al. 2016)."""

    def __call__(self, x: Tensor, weight_D: Tensor, bias_D: Tensor, epsilon: float) -> Tensor:
        """Return the standardised last dim times weight plus bias; same shape and dtype as ``x``."""
        ...


@dataclass(frozen=True)
class NormKernels:
    """What a backend of the role ``norm`` brings.

    Attributes:
        rms_norm: RMSNorm.
        layer_norm: LayerNorm.
    """

    rms_norm: RMSNormKernel
    layer_norm: LayerNormKernel


def rms_norm_torch(x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """torch's RMSNorm. See :class:`RMSNormKernel`."""
    return F.rms_norm(x, weight_D.shape, weight_D, epsilon)


def layer_norm_torch(x: Tensor, weight_D: Tensor, bias_D: Tensor, epsilon: float) -> Tensor:
    """torch's LayerNorm. See :class:`LayerNormKernel`."""
    return F.layer_norm(x, weight_D.shape, weight_D, bias_D, epsilon)


class _RMSNormOnCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        rstd = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(epsilon).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight_D, rstd)
        return (x * rstd).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_D, rstd = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()
        grad_x, grad_weight_D, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight_D.shape, torch.zeros_like(rstd), rstd, weight_D, None, [True, True, False]
        )
        through_mean = (grad @ weight_D).div_(x.shape[-1]).unsqueeze(-1).mul_(rstd)
        return grad_x.add_(through_mean), grad_weight_D, None


def rms_norm_cpu(x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """RMSNorm in fp32 (or fp64) on a CPU. See :class:`RMSNormKernel`."""
    return _RMSNormOnCpu.apply(x.contiguous(), weight_D, epsilon)
