"""Norms as modules: a weight, perhaps a bias, and the kernel that the registry chose.

Shape suffixes: D normalised width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_glue.backends.norm import LayerNormKernel, RMSNormKernel
from megatron_glue.backends.registry import Backends
from megatron_glue.config.sections import ModelConfig
from megatron_glue.parallel.precision import local


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim.

    Args:
        width: D.
        epsilon: Added to the mean square.
        kernel: Computes it.
    """

    def __init__(self, width: int, epsilon: float, kernel: RMSNormKernel) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._epsilon = epsilon
        self._kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim of ``x``; same shape and dtype."""
        return self._kernel(x, local(self.weight, x.dtype), self._epsilon)


class LayerNorm(nn.Module):
    """Mean and variance norm over the last dim.

    Args:
        width: D.
        epsilon: Added to the variance.
        kernel: Computes it.
    """

    def __init__(self, width: int, epsilon: float, kernel: LayerNormKernel) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self._epsilon = epsilon
        self._kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim of ``x``; same shape and dtype."""
        return self._kernel(x, local(self.weight, x.dtype), local(self.bias, x.dtype), self._epsilon)


def build_norm(model: ModelConfig, backends: Backends, width: int | None = None) -> RMSNorm | LayerNorm:
    """Build the kind of norm that the model uses.

    Args:
        model: Kind and epsilon.
        backends: Kernels.
        width: Normalised width; ``None`` for the hidden size.

    Returns:
        The norm, weight one and bias zero.
    """
    width = width or model.hidden_size
    if model.normalization == "RMSNorm":
        return RMSNorm(width, model.norm_epsilon, backends.rms_norm)
    return LayerNorm(width, model.norm_epsilon, backends.layer_norm)
