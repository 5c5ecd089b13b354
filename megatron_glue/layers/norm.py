"""Norms as modules: a weight, perhaps a bias, and the kernel that the registry chose.

Shape suffixes: D normalised width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_glue.backends.norm import LayerNormKernel, RMSNormKernel
from megatron_glue.config.sections import ModelConfig
from megatron_glue.layers.build import LayerBuild
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


def build_norm(model: ModelConfig, build: LayerBuild, name: str) -> RMSNorm | LayerNorm:
    """Build a norm of the residual stream, of the kind that the model uses.

    Args:
        model: Kind, width and epsilon.
        build: What layers share.
        name: Global name of the module, e.g. ``blocks.3.ffn_norm``.

    Returns:
        The norm, weight one and bias zero.
    """
    return _build(model, build, name, model.hidden_size, build.stream_axes)


def build_head_norm(model: ModelConfig, build: LayerBuild, name: str) -> RMSNorm | LayerNorm:
    """Build a norm that all heads share.

    Args:
        model: Kind, width of a head and epsilon.
        build: What layers share.
        name: Global name of the module, e.g. ``blocks.3.attention.q_norm``.

    Returns:
        The norm, weight one and bias zero.
    """
    return _build(model, build, name, model.head_dim, build.head_axes)


def _build(
    model: ModelConfig, build: LayerBuild, name: str, width: int, partial_axes: tuple[str, ...]
) -> RMSNorm | LayerNorm:
    if model.normalization == "RMSNorm":
        norm = RMSNorm(width, model.norm_epsilon, build.backends.rms_norm)
    else:
        norm = LayerNorm(width, model.norm_epsilon, build.backends.layer_norm)
    for local_name, param in norm.named_parameters():
        build.place(param, f"{name}.{local_name}", partial_axes=partial_axes)
    return norm
