"""The decoder language model, or one part of it: embedding, blocks, final norm, and the loss over the vocabulary.

Takes a whole :class:`PackedBatch` and returns the SUM of its token losses: dividing by the tokens of the optimizer step
is the training step's business. A part of a pipeline holds what it has: without an embedding it starts from the
activations of the part before it, without a final norm it returns its own. It knows no process group and no optimizer.
How blocks are recomputed and where their inputs wait meanwhile is decided by the activation manager inside its
``ManagedBlock`` shells.

Shape suffixes: T tokens, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_glue.layers.dropout import SeededDropout
from megatron_glue.layers.embedding import OutputHead, TokenEmbedding
from megatron_glue.ops.cross_entropy import LossChunks, linear_cross_entropy
from megatron_glue.parallel.precision import local
from megatron_glue.parallel.tensor import TensorParallel
from megatron_glue.parallel.vocabulary import vocab_parallel_linear_cross_entropy, vocab_parallel_logits
from megatron_glue.types import ForwardContext, PackedBatch


@dataclass(frozen=True)
class OutputConfig:
    """What the output layer needs beside its weight.

    Attributes:
        chunks: Real entries of the vocabulary (the loss masks the padded ones out), and how the loss is computed.
        compute_dtype: Dtype of activations.
        tensor_parallel: Ranks that hold the other parts of the vocabulary; ``None`` for none.
    """

    chunks: LossChunks
    compute_dtype: torch.dtype
    tensor_parallel: TensorParallel | None = None


class GPT(nn.Module):
    """A pre-norm decoder over packed sequences, or the part of it that one pipeline stage holds.

    Attributes:
        forward_methods: Methods beside ``forward`` that run layers, for the data-parallel engine.
        blocks: Decoder blocks by GLOBAL layer index, so that their names do not depend on the pipeline.

    Args:
        embedding: Token ids and positions to the residual stream; ``None`` in parts behind the first.
        blocks: Decoder blocks in their shells by global layer index, in order, each called
            ``block(x_TD, context) -> x_TD``.
        final_norm: Norm before the output layer; ``None`` in parts before the last.
        output_head: The output layer's weight [V, D] where it stands on its own; ``None``: that of the embedding.
        dropout: Dropout on the embedded tokens.
        output: The rest of the output layer.
    """

    forward_methods = ("activations", "logits")

    def __init__(
        self,
        embedding: TokenEmbedding | None,
        blocks: Mapping[int, nn.Module],
        final_norm: nn.Module | None,
        output_head: OutputHead | None,
        dropout: SeededDropout,
        output: OutputConfig,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.dropout = dropout
        self.blocks = nn.ModuleDict({str(layer_index): block for layer_index, block in blocks.items()})
        self.final_norm = final_norm
        self.output_head = output_head
        self.output = output

    @property
    def is_first(self) -> bool:
        """Whether this part starts from token ids."""
        return self.embedding is not None

    @property
    def is_last(self) -> bool:
        """Whether this part ends in the loss."""
        return self.final_norm is not None

    def forward(self, batch: PackedBatch, context: ForwardContext, x_TD: Tensor | None = None) -> Tensor:
        """Run this part on one micro-batch.

        Args:
            batch: Token ids and labels, on the model's device.
            context: The micro-batch as blocks see it.
            x_TD: [T, D] activations of the part before; ``None`` for the first part.

        Returns:
            Of the last part, an fp32 scalar: the sum of the next-token losses of all labelled tokens, 0 if there is
            none. Of any other part its activations, as :meth:`activations` returns them.
        """
        x_TD = self._run(batch.input_ids_T, context, x_TD)
        if not self.is_last:
            return x_TD
        weight_VD, output = self._output_weight(), self.output
        # In the dtype the engine keeps it in: the loss casts an fp32 master for its products, and the sum over
        # chunks that is the master's gradient arrives unrounded.
        inputs = x_TD, local(weight_VD, weight_VD.dtype), batch.labels_T
        tp = output.tensor_parallel
        if tp is None:
            return linear_cross_entropy(*inputs, output.chunks)
        return vocab_parallel_linear_cross_entropy(*inputs, output.chunks, tp)

    def activations(self, input_ids_T: Tensor, context: ForwardContext, x_TD: Tensor | None = None) -> Tensor:
        """Run this part without the output layer.

        Args:
            input_ids_T: int64 token ids; read by the first part.
            context: The micro-batch as blocks see it.
            x_TD: [T, D] activations of the part before; ``None`` for the first part.

        Returns:
            [T, D] in the compute dtype, behind the final norm where this part has it.
        """
        return self._run(input_ids_T, context, x_TD)

    def logits(self, input_ids_T: Tensor, context: ForwardContext, row: int, x_TD: Tensor | None = None) -> Tensor:
        """Logits of one token, for sampling; of the last part.

        Args:
            input_ids_T: int64 token ids; read by the first part.
            context: The micro-batch as blocks see it.
            row: Token whose successor is asked for.
            x_TD: [T, D] activations of the part before; ``None`` for the first part.

        Returns:
            fp32 [vocab_size].
        """
        assert self.is_last, "logits come from the last part"
        x_TD, output = self._run(input_ids_T, context, x_TD), self.output
        weight_VD = local(self._output_weight(), x_TD.dtype)
        if output.tensor_parallel is None:
            return (weight_VD[: output.chunks.vocab_size] @ x_TD[row]).float()
        return vocab_parallel_logits(x_TD, weight_VD, row, output.chunks.vocab_size, output.tensor_parallel)

    def _run(self, input_ids_T: Tensor, context: ForwardContext, x_TD: Tensor | None) -> Tensor:
        if self.embedding is not None:
            assert x_TD is None, "the first part starts from token ids"
            x_TD = self.embedding(input_ids_T, context, self.output.compute_dtype)
            x_TD = self.dropout(x_TD, context)
        assert x_TD is not None, "a part behind the first starts from activations"
        stream_TD: Tensor = x_TD
        for block in self.blocks.values():
            stream_TD = block(stream_TD, context)
        return stream_TD if self.final_norm is None else self.final_norm(stream_TD)

    def _output_weight(self) -> Tensor:
        if self.output_head is not None:
            return self.output_head.weight
        assert self.embedding is not None, "a last part without the embedding has an output weight of its own"
        return self.embedding.weight


class ModelParts(nn.Module):
    """The parts of the decoder that one pipeline rank holds, in order of stages. It runs nothing itself.

    Args:
        parts: At least one.
    """

    def __init__(self, parts: Sequence[GPT]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
