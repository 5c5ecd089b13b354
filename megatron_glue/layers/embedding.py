"""Token ids to the residual stream, and the weight that leads back to the vocabulary.

Absolute positions, learned or sinusoidal, are added here; RoPE is attention's business. The vocabulary is padded so
that its products have a friendly shape; padded rows are never looked up and the loss masks them out.

The start and the end of a batch's way. The output product itself is part of ``ops/cross_entropy.py``, because full
logits should never exist. Tensor-parallel ranks each hold a part of the vocabulary (``parallel/vocabulary.py``).

Shape suffixes: T tokens, S rows of the residual stream on this rank (T without sequence parallelism), D model, V rows
of the padded vocabulary on this rank, P positions.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.sections import ModelConfig
from megatron_glue.layers.build import LayerBuild
from megatron_glue.layers.long_lived_cache import LongLivedCache
from megatron_glue.layers.rotary import SinusoidalConfig, num_table_positions, position_rows
from megatron_glue.parallel.precision import local
from megatron_glue.parallel.shard_spec import tensor_split
from megatron_glue.parallel.tensor import TensorParallel
from megatron_glue.parallel.vocabulary import vocab_parallel_embedding
from megatron_glue.types import ForwardContext

EMBEDDING_NAME = "embedding.weight"


def padded_vocab_size(vocab_size: int, divisor: int) -> int:
    """Return the smallest multiple of ``divisor`` that holds the vocabulary."""
    return -(-vocab_size // divisor) * divisor


class TokenEmbedding(nn.Module):
    """Rows of the vocabulary, plus absolute positions if the model has them.

    Args:
        num_rows: V.
        hidden_size: D.
        num_learned_positions: P of a learned table; 0 for none.
        sinusoids: Shape of a sinusoidal table, and what keeps it; ``None`` for none.
        tensor_parallel: Ranks that hold the other rows; ``None`` for none.
    """

    def __init__(
        self,
        num_rows: int,
        hidden_size: int,
        *,
        num_learned_positions: int = 0,
        sinusoids: tuple[SinusoidalConfig, LongLivedCache] | None = None,
        tensor_parallel: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        self._tensor_parallel = tensor_parallel
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size))
        self.position_weight = None
        if num_learned_positions:
            self.position_weight = nn.Parameter(torch.empty(num_learned_positions, hidden_size))
        self._sinusoids = sinusoids

    def forward(self, input_ids_T: Tensor, context: ForwardContext, dtype: torch.dtype) -> Tensor:
        """Look tokens up.

        Args:
            input_ids_T: int64 token ids.
            context: The micro-batch: positions inside each document, and the rows that this rank holds.
            dtype: Compute dtype.

        Returns:
            [S, D] in ``dtype``.
        """
        sequence, rows = context.sequence, context.residual_rows
        x_SD = self._look_up(input_ids_T, dtype)
        if self.position_weight is not None:
            positions_S = sequence.positions_T if rows is None else sequence.positions_T[rows]
            x_SD = x_SD + F.embedding(positions_S, local(self.position_weight, self.position_weight.dtype))
        elif self._sinusoids is not None:
            config, cache = self._sinusoids
            (positions_SD,) = position_rows(config, sequence, cache, rows)
            # The factor of Vaswani et al. 2017: sinusoids of size 1 would drown small initial embeddings.
            x_SD = x_SD * math.sqrt(x_SD.shape[1]) + positions_SD
        return x_SD.to(dtype)

    def _look_up(self, input_ids_T: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the vocabulary, in its own dtype where positions are still to be added."""
        weight_VD, tp = local(self.weight, self.weight.dtype), self._tensor_parallel
        if tp is None:
            return F.embedding(input_ids_T, weight_VD)
        has_positions = self.position_weight is not None or self._sinusoids is not None
        return vocab_parallel_embedding(input_ids_T, weight_VD, weight_VD.dtype if has_positions else dtype, tp)


class OutputHead(nn.Module):
    """The output layer's own weight, for models that do not share the embedding's.

    Args:
        num_rows: V.
        hidden_size: D.
    """

    def __init__(self, num_rows: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size))


def build_token_embedding(model: ModelConfig, vocab_size: int, build: LayerBuild) -> TokenEmbedding:
    """Build and initialise the embedding.

    Args:
        model: Shape of the decoder.
        vocab_size: Real entries of the vocabulary.
        build: What layers share.

    Returns:
        This rank's part of the embedding, on the CPU in fp32.

    Raises:
        ConfigError: If absolute positions are wanted and their number is not set, or if the ranks cannot share the
            vocabulary evenly.
    """
    kind, std = model.position_embedding_type, model.init_method_std
    sinusoids = None
    if kind == "sinusoidal":
        config = SinusoidalConfig(num_table_positions(model), model.hidden_size)
        sinusoids = config, build.metadata_cache.manager.long_lived
    embedding = TokenEmbedding(
        _num_own_rows(model, vocab_size, build),
        model.hidden_size,
        num_learned_positions=num_table_positions(model) if kind == "learned" else 0,
        sinusoids=sinusoids,
        tensor_parallel=build.tensor_parallel,
    )
    build.place(embedding.weight, EMBEDDING_NAME, tensor_split(0), std=std)
    if embedding.position_weight is not None:
        name = "embedding.position_weight"
        build.place(embedding.position_weight, name, partial_axes=build.stream_axes, std=std)
    return embedding


def build_output_head(
    model: ModelConfig, vocab_size: int, build: LayerBuild, *, has_embedding: bool = True
) -> OutputHead | None:
    """Build and initialise the output weight.

    Args:
        model: Shape of the decoder.
        vocab_size: Real entries of the vocabulary.
        build: What layers share.
        has_embedding: Whether the embedding is in the same part of the model. Otherwise a tied head is a copy of its
            weight, with its values and its global name.

    Returns:
        This rank's part of the head; ``None`` if it is the embedding's weight itself.

    Raises:
        ConfigError: If the ranks cannot share the vocabulary evenly.
    """
    is_tied = not model.untie_embeddings_and_output_weights
    if is_tied and has_embedding:
        return None
    head = OutputHead(_num_own_rows(model, vocab_size, build), model.hidden_size)
    name = EMBEDDING_NAME if is_tied else "output_head.weight"
    build.place(head.weight, name, tensor_split(0), std=model.init_method_std)
    return head


def _num_own_rows(model: ModelConfig, vocab_size: int, build: LayerBuild) -> int:
    num_rows, tp_size = padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by), build.mesh.tp_size
    if num_rows % tp_size:
        raise ConfigError(
            flag_of("make_vocab_size_divisible_by"),
            model.make_vocab_size_divisible_by,
            f"pads the vocabulary to {num_rows} rows, which do not split over {tp_size} tensor-parallel ranks",
            f"use a multiple of {tp_size}",
        )
    return num_rows // tp_size
