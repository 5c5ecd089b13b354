"""RoPE tables of a model: built once per device and shared by its layers, never per step.

The rows of a micro-batch are looked up here; that all layers share them is the business of ``packed_metadata.py``.

Shape suffixes: T tokens, P positions, R half of the rotated width.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.sections import ModelConfig
from megatron_glue.ops.rope import rope_table
from megatron_glue.types import PackedSequence


def num_table_positions(model: ModelConfig) -> int:
    """Return the length of position tables.

    Raises:
        ConfigError: If it is not set.
    """
    if model.max_position_embeddings is None:
        raise ConfigError(
            flag_of("max_position_embeddings"),
            None,
            f"{model.position_embedding_type} positions need the length of their table",
            "set it, at least to the sequence length",
        )
    return model.max_position_embeddings


@dataclass(frozen=True)
class RotaryConfig:
    """Shape of the tables.

    Attributes:
        num_positions: P.
        rotary_dim: Rotated width of a head, 2R.
        base: Base of the frequencies.
    """

    num_positions: int
    rotary_dim: int
    base: float

    @classmethod
    def of_model(cls, model: ModelConfig) -> RotaryConfig | None:
        """Return the model's rotary configuration, ``None`` if it does not use RoPE.

        Raises:
            ConfigError: If the rotated share of a head is less than one pair.
        """
        if model.position_embedding_type != "rope":
            return None
        rotary_dim = int(model.head_dim * model.rotary_percent) // 2 * 2
        if rotary_dim == 0:
            raise ConfigError(
                flag_of("rotary_percent"),
                model.rotary_percent,
                f"rotates less than one pair of a head of {model.head_dim}",
                "raise it, or choose --position-embedding-type none",
            )
        return cls(num_table_positions(model), rotary_dim, model.rotary_base)


@functools.lru_cache(maxsize=8)
def _tables(config: RotaryConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    # Tensors born under inference_mode could not be saved for a later backward.
    with torch.inference_mode(False):
        return rope_table(config.num_positions, config.rotary_dim, config.base, device)


def rotary_rows(config: RotaryConfig, sequence: PackedSequence) -> tuple[Tensor, Tensor]:
    """Look up the angles of a micro-batch's tokens.

    Args:
        config: Shape of the tables.
        sequence: The micro-batch.

    Returns:
        Cosines and sines, fp32 [T, R] each.

    Raises:
        ValueError: If a position lies beyond the tables (known on the host), on whichever context-parallel rank: all
            of them stop then.
    """
    end = max((start + length for start, length in zip(sequence.position_starts, sequence.whole_lengths)), default=0)
    if end > config.num_positions:
        flag = flag_of("max_position_embeddings")
        raise ValueError(f"position {end - 1}: {flag}={config.num_positions} ends before it")
    cos_PR, sin_PR = _tables(config, sequence.device)
    positions_T = sequence.positions_T
    return cos_PR.index_select(0, positions_T), sin_PR.index_select(0, positions_T)
