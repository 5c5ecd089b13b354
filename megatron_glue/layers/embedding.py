"""Token ids to the residual stream, and the weight that leads back to the vocabulary.

Absolute positions, learned or sinusoidal, are added here; RoPE is attention's business. The vocabulary is padded so
that its products have a friendly shape; padded rows are never looked up and the loss masks them out.

The start and the end of a batch's way. The output product itself is part of ``ops/cross_entropy.py``, because full
logits should never exist.

Shape suffixes: T tokens, D model, V padded vocabulary, P positions.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_glue.config.sections import ModelConfig
from megatron_glue.layers.initialisation import init_normal_
from megatron_glue.layers.rotary import num_table_positions
from megatron_glue.ops.rope import sinusoidal_table
from megatron_glue.parallel.precision import local
from megatron_glue.parallel.shard_spec import ShardSpec, set_shard_spec


def padded_vocab_size(vocab_size: int, divisor: int) -> int:
    """Return the smallest multiple of ``divisor`` that holds the vocabulary."""
    return -(-vocab_size // divisor) * divisor


class TokenEmbedding(nn.Module):
    """Rows of the vocabulary, plus absolute positions if the model has them.

    Args:
        num_rows: V.
        hidden_size: D.
        num_learned_positions: P of a learned table; 0 for none.
        num_sinusoidal_positions: P of a sinusoidal table; 0 for none.
    """

    def __init__(
        self, num_rows: int, hidden_size: int, *, num_learned_positions: int = 0, num_sinusoidal_positions: int = 0
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size))
        self.position_weight = None
        if num_learned_positions:
            self.position_weight = nn.Parameter(torch.empty(num_learned_positions, hidden_size))
        table_PD = sinusoidal_table(num_sinusoidal_positions, hidden_size) if num_sinusoidal_positions else None
        self.register_buffer("position_table", table_PD, persistent=False)

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, dtype: torch.dtype) -> Tensor:
        """Look tokens up.

        Args:
            input_ids_T: int64 token ids.
            positions_T: int64 positions inside each document.
            dtype: Compute dtype.

        Returns:
            [T, D] in ``dtype``.
        """
        x_TD = F.embedding(input_ids_T, local(self.weight, self.weight.dtype))
        if self.position_weight is not None:
            x_TD = x_TD + F.embedding(positions_T, local(self.position_weight, self.position_weight.dtype))
        elif isinstance(self.position_table, Tensor):
            # The factor of Vaswani et al. 2017: sinusoids of size 1 would drown small initial embeddings.
            x_TD = x_TD * math.sqrt(x_TD.shape[1]) + self.position_table.index_select(0, positions_T)
        return x_TD.to(dtype)


class OutputHead(nn.Module):
    """The output layer's own weight, for models that do not share the embedding's.

    Args:
        num_rows: V.
        hidden_size: D.
    """

    def __init__(self, num_rows: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size))


def build_token_embedding(model: ModelConfig, vocab_size: int, seed: int) -> TokenEmbedding:
    """Build and initialise the embedding.

    Args:
        model: Shape of the decoder.
        vocab_size: Real entries of the vocabulary.
        seed: The run's seed.

    Returns:
        The embedding, on the CPU in fp32.

    Raises:
        ConfigError: If absolute positions are wanted and their number is not set.
    """
    kind = model.position_embedding_type
    embedding = TokenEmbedding(
        padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by),
        model.hidden_size,
        num_learned_positions=num_table_positions(model) if kind == "learned" else 0,
        num_sinusoidal_positions=num_table_positions(model) if kind == "sinusoidal" else 0,
    )
    init_normal_(embedding.weight, model.init_method_std, seed, "embedding.weight")
    if embedding.position_weight is not None:
        init_normal_(embedding.position_weight, model.init_method_std, seed, "embedding.position_weight")
    return embedding


def build_output_head(
    model: ModelConfig, vocab_size: int, seed: int, *, has_embedding: bool = True
) -> OutputHead | None:
    """Build and initialise the output weight.

    Args:
        model: Shape of the decoder.
        vocab_size: Real entries of the vocabulary.
        seed: The run's seed.
        has_embedding: Whether the embedding is in the same part of the model. Otherwise a tied head is a copy of its
            weight, with its values and its global name.

    Returns:
        The head; ``None`` if it is the embedding's weight itself.
    """
    is_tied = not model.untie_embeddings_and_output_weights
    if is_tied and has_embedding:
        return None
    head = OutputHead(padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by), model.hidden_size)
    name = "embedding.weight" if is_tied else "output_head.weight"
    init_normal_(head.weight, model.init_method_std, seed, name)
    set_shard_spec(head.weight, ShardSpec(name, tuple(head.weight.shape)))
    return head
