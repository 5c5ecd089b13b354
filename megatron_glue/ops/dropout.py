"""Dropout whose mask is a pure function of a seed and of global positions.

A mask bit is a hash of (seed, row, column), so it does not matter what ran before, in which order, or on which rank:
recompute, a resumed run, and a rank that holds only some rows or columns all see the same bits, and the global random
generators are never touched. The price is a dozen integer operations per element; with ``p == 0`` nothing runs.

It does not choose seeds: layers derive one per (run seed, step, micro-batch, layer, site) with :func:`derive_seed`.

Shape suffixes: T tokens, D model width.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_MASK_64 = (1 << 64) - 1


def _splitmix64(value: int) -> int:
    """One step of the splitmix64 generator (Steele, Lea, Flood 2014), as a mixing function."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def derive_seed(*parts: int) -> int:
    """Hash integers to a seed; order matters, and neighbouring inputs give unrelated seeds.

    Args:
        *parts: Integers of any size and sign.

    Returns:
        An integer in [0, 2**63), the same on every machine and in every process.
    """
    state = len(parts)
    for part in parts:
        state = _splitmix64(state ^ _splitmix64(part & _MASK_64))
    return state >> 1


def seed_of_name(name: str) -> int:
    """Hash a parameter's global name to an integer in [0, 2**63); Python's own ``hash`` differs between processes."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def _signed_32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix_32_(bits: Tensor) -> Tensor:
    """Mix int32 values in place: a bijection of 32 bits with low bias (the "lowbias32" constants of C. Wellons)."""
    # >> on int32 repeats the sign bit; the masks turn it into the logical shift that the mixing needs.
    bits ^= (bits >> 16) & 0xFFFF
    bits *= 0x7FEB352D
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _signed_32(0x846CA68B)
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def position_keys(positions: Tensor, seed: int) -> Tensor:
    """Hash global positions (rows or columns of a mask) to one int32 key each.

    Args:
        positions: Integer tensor of any shape; values below 2**32.
        seed: From :func:`derive_seed`.

    Returns:
        int32, same shape and device.
    """
    bits = positions.to(torch.int32, copy=True)
    bits ^= _signed_32(seed)
    return _mix_32_(_mix_32_(bits).add_(_signed_32(seed >> 32)))


def keep_mask(row_keys: Tensor, column_keys: Tensor, p: float) -> Tensor:
    """Return which elements survive.

    Args:
        row_keys: int32 keys, broadcastable against ``column_keys``.
        column_keys: int32 keys.
        p: Probability of dropping, in [0, 1).

    Returns:
        bool, of the broadcast shape: True with probability 1 - p.
    """
    bits = _mix_32_(row_keys ^ column_keys)
    return bits >= _signed_32(round(p * (1 << 32)) - (1 << 31))


def seeded_dropout(
    x_TD: Tensor,
    p: float,
    seed: int,
    *,
    row_offset: int = 0,
    column_offset: int = 0,
    row_ids_T: Tensor | None = None,
) -> Tensor:
    """Drop elements and scale the rest by 1 / (1 - p) (inverted dropout, Srivastava et al. 2014).

    Args:
        x_TD: Two-dimensional, a block of a larger matrix or all of it.
        p: Probability of dropping, in [0, 1).
        seed: Seed of the larger matrix's mask.
        row_offset: Index in the larger matrix of the first row.
        column_offset: Index in the larger matrix of the first column.
        row_ids_T: Integer index in the larger matrix of each row, where they do not follow each other; ``row_offset``
            is then not used.

    Returns:
        Same shape and dtype; ``x_TD`` itself when ``p`` is 0.
    """
    if p == 0.0:
        return x_TD
    num_rows, num_columns = x_TD.shape
    rows = row_ids_T
    if rows is None:
        rows = torch.arange(row_offset, row_offset + num_rows, device=x_TD.device)
    assert rows.shape == (num_rows,), f"{tuple(rows.shape)} row indices for {num_rows} rows"
    columns = torch.arange(column_offset, column_offset + num_columns, device=x_TD.device)
    row_keys = position_keys(rows, derive_seed(seed, 0))
    column_keys = position_keys(columns, derive_seed(seed, 1))
    # The product keeps the one-byte mask for backward, not a float copy of it.
    return x_TD * keep_mask(row_keys[:, None], column_keys, p) * (1.0 / (1.0 - p))
