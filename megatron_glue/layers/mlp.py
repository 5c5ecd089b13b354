"""The dense feed-forward network of a block: SwiGLU or GELU.

Gate and up are one product whose two parts have an own dim, so that a split of the ffn width cuts both alike:
``gate_up_weight`` is [2, F, D] for SwiGLU and [1, F, D] for GELU. Tensor-parallel ranks each hold a part of F.

It also serves as the shared expert of an MoE layer. It is called like any feed-forward: ``ffn(x_TD, context)``.

Shape suffixes: T tokens (rows of the residual stream on this rank), D model, F ffn width on this rank, G = parts * F.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.sections import ModelConfig
from megatron_glue.layers.build import LayerBuild
from megatron_glue.layers.initialisation import residual_std
from megatron_glue.ops.matmul import TORCH_MATMUL, MatMul
from megatron_glue.ops.swiglu import swiglu
from megatron_glue.parallel.precision import local
from megatron_glue.parallel.shard_spec import tensor_split
from megatron_glue.parallel.tensor import TensorParallel, column_linear, row_linear
from megatron_glue.types import ForwardContext


class FeedForward(nn.Module):
    """Two products with a nonlinearity between them.

    Args:
        hidden_size: D.
        ffn_size: F.
        gated: SwiGLU (two parts in the first product); else GELU (one).
        has_bias: Biases on both products.
        tensor_parallel: Ranks that hold the other parts of the width; ``None`` for none.
        matmul: Computes the products.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        gated: bool,
        has_bias: bool,
        tensor_parallel: TensorParallel | None = None,
        matmul: MatMul = TORCH_MATMUL,
    ) -> None:
        super().__init__()
        self._tensor_parallel = tensor_parallel
        self._matmul = matmul
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
            context: The micro-batch.

        Returns:
            [T, D].
        """
        return context.recompute("mlp", self._transform, x_TD)

    def _transform(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        bias_G = None if self.gate_up_bias is None else local(self.gate_up_bias, x_TD.dtype).flatten()
        hidden_TG = column_linear(
            x_TD, local(self.gate_up_weight, x_TD.dtype).flatten(0, 1), bias_G, self._tensor_parallel, self._matmul
        )
        down_bias_D = None if self.down_bias is None else local(self.down_bias, x_TD.dtype)
        down_weight_DF = local(self.down_weight, x_TD.dtype)
        with context.region("mlp_act", down_weight_DF):
            hidden_TF = swiglu(hidden_TG) if self._gated else F.gelu(hidden_TG, approximate="tanh")
            return row_linear(hidden_TF, down_weight_DF, down_bias_D, self._tensor_parallel, self._matmul)


def build_feed_forward(
    model: ModelConfig, prefix: str, build: LayerBuild, *, ffn_size: int | None = None
) -> FeedForward:
    """Build and initialise a dense feed-forward network.

    Args:
        model: Shape of the decoder.
        prefix: Global name of the module, e.g. ``blocks.3.ffn``.
        build: What layers share.
        ffn_size: Width over all ranks, if it is not the model's.

    Returns:
        This rank's part of the network, on the CPU in fp32.

    Raises:
        ConfigError: If the ranks cannot share the width evenly.
    """
    width, tp_size = ffn_size or model.ffn_width, build.mesh.tp_size
    if width % tp_size:
        field = "ffn_hidden_size" if ffn_size is None else "moe_shared_expert_intermediate_size"
        raise ConfigError(
            flag_of(field),
            width,
            f"does not split over {tp_size} tensor-parallel ranks",
            f"use a multiple of {tp_size}",
        )
    ffn = FeedForward(
        model.hidden_size,
        width // tp_size,
        gated=model.swiglu,
        has_bias=model.add_bias_linear,
        tensor_parallel=build.tensor_parallel,
        matmul=build.backends.matmul,
    )
    residual = residual_std(model.init_method_std, model.num_layers)
    build.place(ffn.gate_up_weight, f"{prefix}.gate_up_weight", tensor_split(1), std=model.init_method_std)
    build.place(ffn.down_weight, f"{prefix}.down_weight", tensor_split(1), std=residual)
    if ffn.gate_up_bias is not None and ffn.down_bias is not None:
        build.place(ffn.gate_up_bias, f"{prefix}.gate_up_bias", tensor_split(1))
        build.place(ffn.down_bias, f"{prefix}.down_bias", partial_axes=build.stream_axes)
    return ffn
