"""The dense feed-forward network of a block: SwiGLU or GELU.

Gate and up are one product whose two parts have an own dim, so that a split of the ffn width cuts both alike:
``gate_up_weight`` is [2, F, D] for SwiGLU and [1, F, D] for GELU.

It also serves as the shared expert of an MoE layer. It is called like any feed-forward: ``ffn(x_TD, context)``.

Shape suffixes: T tokens, D model, F ffn width, G = parts * F.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_glue.config.sections import ModelConfig
from megatron_glue.layers.initialisation import init_normal_, residual_std
from megatron_glue.ops.swiglu import swiglu
from megatron_glue.parallel.precision import local
from megatron_glue.types import ForwardContext


class FeedForward(nn.Module):
    """Two products with a nonlinearity between them.

    Args:
        hidden_size: D.
        ffn_size: F.
        gated: SwiGLU (two parts in the first product); else GELU (one).
        has_bias: Biases on both products.
    """

    def __init__(self, hidden_size: int, ffn_size: int, *, gated: bool, has_bias: bool) -> None:
        super().__init__()
        num_parts = 2 if gated else 1
        self._gated = gated
        self.gate_up_weight = nn.Parameter(torch.empty(num_parts, ffn_size, hidden_size))
        self.down_weight = nn.Parameter(torch.empty(hidden_size, ffn_size))
        self.gate_up_bias = self.down_bias = None
        if has_bias:
            self.gate_up_bias = nn.Parameter(torch.zeros(num_parts, ffn_size))
            self.down_bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """Transform each token.

        Args:
            x_TD: Normalised residual stream.
            context: Not looked at; every feed-forward is called alike.

        Returns:
            [T, D].
        """
        bias_G = None if self.gate_up_bias is None else local(self.gate_up_bias, x_TD.dtype).flatten()
        hidden_TG = F.linear(x_TD, local(self.gate_up_weight, x_TD.dtype).flatten(0, 1), bias_G)
        hidden_TF = swiglu(hidden_TG) if self._gated else F.gelu(hidden_TG, approximate="tanh")
        down_bias_D = None if self.down_bias is None else local(self.down_bias, x_TD.dtype)
        return F.linear(hidden_TF, local(self.down_weight, x_TD.dtype), down_bias_D)


def build_feed_forward(model: ModelConfig, prefix: str, seed: int, *, ffn_size: int | None = None) -> FeedForward:
    """Build and initialise a dense feed-forward network.

    Args:
        model: Shape of the decoder.
        prefix: Global name of the module, e.g. ``blocks.3.ffn``.
        seed: The run's seed.
        ffn_size: Width, if it is not the model's.

    Returns:
        The network, on the CPU in fp32.
    """
    ffn = FeedForward(
        model.hidden_size, ffn_size or model.ffn_width, gated=model.swiglu, has_bias=model.add_bias_linear
    )
    init_normal_(ffn.gate_up_weight, model.init_method_std, seed, f"{prefix}.gate_up_weight")
    std = residual_std(model.init_method_std, model.num_layers)
    init_normal_(ffn.down_weight, std, seed, f"{prefix}.down_weight")
    return ffn
