"""Tables of positions, RoPE's and sinusoidal: built once per device and shared by all layers, never per step.

The rows of a micro-batch are looked up here. That all layers share them is the business of ``packed_metadata.py``; how
much memory tables may take, and whether they wait on the host, that of ``long_lived_cache.py``.

Shape suffixes: T tokens, S of them, P positions, D model, R half of the rotated width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.sections import ModelConfig
from megatron_glue.layers.long_lived_cache import CacheKey, LongLivedCache
from megatron_glue.ops.rope import rope_table, sinusoidal_table
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


class PositionTables(Protocol):
    """Tables with one row per position; hashable, and equal where all their values are."""

    kind: ClassVar[str]

    @property
    def num_positions(self) -> int:
        """P."""
        ...

    def build(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return fp32 tables of P rows on the device."""
        ...


@dataclass(frozen=True)
class SinusoidalConfig:
    """Shape of a table of sinusoids.

    Attributes:
        num_positions: P.
        hidden_size: D.
    """

    kind: ClassVar[str] = "sinusoidal_table"

    num_positions: int
    hidden_size: int

    def build(self, device: torch.device) -> tuple[Tensor, ...]:
        """See :class:`PositionTables`: [P, D]."""
        return (sinusoidal_table(self.num_positions, self.hidden_size, device),)


@dataclass(frozen=True)
class RotaryConfig:
    """Shape of RoPE's tables.

    Attributes:
        num_positions: P.
        rotary_dim: Rotated width of a head, 2R.
        base: Base of the frequencies.
    """

    kind: ClassVar[str] = "rope_tables"

    num_positions: int
    rotary_dim: int
    base: float

    def build(self, device: torch.device) -> tuple[Tensor, ...]:
        """See :class:`PositionTables`: cosines and sines, [P, R] each."""
        return rope_table(self.num_positions, self.rotary_dim, self.base, device)

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


def position_rows(
    tables: PositionTables, sequence: PackedSequence, cache: LongLivedCache, rows: slice | None = None
) -> tuple[Tensor, ...]:
    """Look up the rows of a micro-batch's tokens.

    Where the tables are on the host, what is needed of them comes to a GPU from pinned memory, on the current stream
    and without making the host wait.

    Args:
        tables: Which ones.
        sequence: The micro-batch.
        cache: Keeps the tables.
        rows: Tokens that are asked for; ``None`` for all.

    Returns:
        For each table fp32 [S, ...], on the device of the micro-batch.

    Raises:
        ValueError: If a position lies beyond the tables (known on the host), on whichever context-parallel rank: all
            of them stop then.
    """
    end = max((start + length for start, length in zip(sequence.position_starts, sequence.whole_lengths)), default=0)
    if end > tables.num_positions:
        flag = flag_of("max_position_embeddings")
        raise ValueError(f"position {end - 1}: {flag}={tables.num_positions} ends before it")
    device, home = sequence.device, cache.home_of(sequence.device)
    is_pinned = home.type == "cpu" and device.type == "cuda"

    def build() -> tuple[Tensor, ...]:
        built = tables.build(home)
        return tuple(table.pin_memory() for table in built) if is_pinned else built

    found = cache.get(CacheKey(tables.kind, (tables, is_pinned), home, torch.float32), build)
    if home != device:
        # Padding stands at position 0, also where it is all there is.
        found = tuple(table[: max(end, 1)].to(device, non_blocking=True) for table in found)
    positions_S = sequence.positions_T if rows is None else sequence.positions_T[rows]
    return tuple(table.index_select(0, positions_S) for table in found)


def rotary_rows(config: RotaryConfig, sequence: PackedSequence, cache: LongLivedCache) -> tuple[Tensor, Tensor]:
    """Look up the angles of a micro-batch's tokens.

    Args:
        config: Shape of the tables.
        sequence: The micro-batch.
        cache: Keeps the tables.

    Returns:
        Cosines and sines, fp32 [T, R] each.

    Raises:
        ValueError: See :func:`position_rows`.
    """
    cos_TR, sin_TR = position_rows(config, sequence, cache)
    return cos_TR, sin_TR
