"""One pre-norm decoder block: ``x + attention(norm(x))``, then ``x + ffn(norm(x))``.

The feed-forward is handed in, dense or mixture-of-experts, so this room knows nothing of experts. A block is a pure
function of its input, its parameters and the context, which is what lets it run a second time for backward.

Shape suffixes: T tokens (rows of the residual stream on this rank), D model.
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron_glue.config.sections import ModelConfig
from megatron_glue.layers.attention import PackedAttention, build_attention
from megatron_glue.layers.build import LayerBuild
from megatron_glue.layers.dropout import SeededDropout
from megatron_glue.layers.norm import build_norm
from megatron_glue.types import ForwardContext


class DecoderBlock(nn.Module):
    """Attention and feed-forward on the residual stream.

    Args:
        attention: Called ``attention(x_TD, context)``.
        ffn: Called ``ffn(x_TD, context)``.
        attention_norm: Before attention.
        ffn_norm: Before the feed-forward.
        dropout: Probability on both branches.
        layer_index: Global index of the block.
    """

    def __init__(
        self,
        attention: PackedAttention,
        ffn: nn.Module,
        attention_norm: nn.Module,
        ffn_norm: nn.Module,
        dropout: float,
        layer_index: int,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.ffn_norm = ffn_norm
        self.ffn = ffn
        self.attention_dropout = SeededDropout(dropout, layer_index, "attention.output")
        self.ffn_dropout = SeededDropout(dropout, layer_index, "ffn.output")

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """Run the block.

        Args:
            x_TD: Residual stream.
            context: The micro-batch.

        Returns:
            [T, D].
        """
        with context.rebuilt("layernorm", self.attention_norm, x_TD) as normalised_TD:
            attended_TD = self.attention(normalised_TD, context)
        x_TD = x_TD + self.attention_dropout(attended_TD, context)
        with context.rebuilt("layernorm", self.ffn_norm, x_TD) as normalised_TD:
            transformed_TD = self.ffn(normalised_TD, context)
        return x_TD + self.ffn_dropout(transformed_TD, context)


def build_decoder_block(model: ModelConfig, layer_index: int, ffn: nn.Module, build: LayerBuild) -> DecoderBlock:
    """Build and initialise one block around a feed-forward.

    Args:
        model: Shape of the decoder.
        layer_index: Global index of the block; its parameters are named ``blocks.<layer_index>. ...``.
        ffn: The feed-forward, initialised.
        build: What layers share.

    Returns:
        The block, on the CPU in fp32.

    Raises:
        ConfigError: If the configuration is contradictory or needs what the kernels lack.
    """
    prefix = f"blocks.{layer_index}"
    return DecoderBlock(
        build_attention(model, layer_index, build),
        ffn,
        build_norm(model, build, f"{prefix}.attention_norm"),
        build_norm(model, build, f"{prefix}.ffn_norm"),
        model.hidden_dropout,
        layer_index,
    )
