"""The decoder language model: embedding, blocks, final norm, and the loss over the vocabulary.

Takes a whole :class:`PackedBatch` and returns the SUM of its token losses: dividing by the tokens of the optimizer step
is the training step's business. It knows no process group and no optimizer. How blocks are recomputed and where their
inputs wait meanwhile is decided by the activation manager inside its ``ManagedBlock`` shells.

Shape suffixes: T tokens, D model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_glue.layers.dropout import SeededDropout
from megatron_glue.layers.embedding import OutputHead, TokenEmbedding
from megatron_glue.ops.cross_entropy import linear_cross_entropy
from megatron_glue.parallel.precision import local
from megatron_glue.types import ForwardContext, PackedBatch


@dataclass(frozen=True)
class OutputConfig:
    """What the output layer needs beside its weight.

    Attributes:
        vocab_size: Real entries of the vocabulary; the padded ones are masked out of the loss.
        chunk_tokens: Tokens whose logits exist at once.
        compute_dtype: Dtype of activations.
    """

    vocab_size: int
    chunk_tokens: int
    compute_dtype: torch.dtype


class GPT(nn.Module):
    """A pre-norm decoder over packed sequences.

    Attributes:
        forward_methods: Methods beside ``forward`` that run layers, for the data-parallel engine.

    Args:
        embedding: Token ids and positions to the residual stream.
        blocks: Decoder blocks in their shells, each called ``block(x_TD, context) -> x_TD``.
        final_norm: Norm before the output layer.
        output_head: The output layer's own weight [V, D]; ``None`` ties it to the embedding.
        dropout: Dropout on the embedded tokens.
        output: The rest of the output layer.
    """

    forward_methods = ("logits",)

    def __init__(
        self,
        embedding: TokenEmbedding,
        blocks: list[nn.Module],
        final_norm: nn.Module,
        output_head: OutputHead | None,
        dropout: SeededDropout,
        output: OutputConfig,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.dropout = dropout
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = final_norm
        self.output_head = output_head
        self.output = output

    def forward(self, batch: PackedBatch, context: ForwardContext) -> Tensor:
        """Compute the summed next-token loss of one micro-batch.

        Args:
            batch: Token ids and labels, on the model's device.
            context: The micro-batch as blocks see it.

        Returns:
            fp32 scalar: the sum of the losses of all labelled tokens, 0 if there is none.
        """
        x_TD = self.hidden_states(batch.input_ids_T, context)
        weight_VD = self._output_weight()
        return linear_cross_entropy(
            x_TD,
            # In the dtype the engine keeps it in: the loss casts an fp32 master for its products, and the sum over
            # chunks that is the master's gradient arrives unrounded.
            local(weight_VD, weight_VD.dtype),
            batch.labels_T,
            vocab_size=self.output.vocab_size,
            chunk_tokens=self.output.chunk_tokens,
        )

    def hidden_states(self, input_ids_T: Tensor, context: ForwardContext) -> Tensor:
        """Run everything up to the final norm.

        Args:
            input_ids_T: int64 token ids.
            context: The micro-batch as blocks see it.

        Returns:
            [T, D] in the compute dtype.
        """
        x_TD = self.embedding(input_ids_T, context.sequence.positions_T, self.output.compute_dtype)
        x_TD = self.dropout(x_TD, context)
        for block in self.blocks:
            x_TD = block(x_TD, context)
        return self.final_norm(x_TD)

    def logits(self, input_ids_T: Tensor, context: ForwardContext, row: int) -> Tensor:
        """Logits of one token, for sampling.

        Args:
            input_ids_T: int64 token ids.
            context: The micro-batch as blocks see it.
            row: Token whose successor is asked for.

        Returns:
            fp32 [vocab_size].
        """
        x_D = self.hidden_states(input_ids_T, context)[row]
        return (local(self._output_weight(), x_D.dtype)[: self.output.vocab_size] @ x_D).float()

    def _output_weight(self) -> Tensor:
        return self.embedding.weight if self.output_head is None else self.output_head.weight
