"""Drops documents that are nearly the same as an earlier one.

A held-out document whose near copy was trained on measures memory, not learning. Two documents count as nearly the
same when their text is equal but for digits and white space, or when half of the later one's 32-byte windows occurred
before. Windows are sampled by content (one in 16), after Schleimer, Wilkerson and Aiken, "Winnowing", SIGMOD 2003.
It is used for the embedded corpus only; a user's own documents are never dropped.

Shape suffixes: N bytes of all texts, W sampled windows, M texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WINDOW_BYTES = 32
MIN_SAMPLES = 3
MAX_SEEN_FRACTION = 0.5

_SAMPLE_SHIFT = 28  # keep windows whose 4 top bits are zero: one in 16
_BLOCK_BYTES = 1 << 17  # hashes of one block stay in the cache
_MULTIPLIER = 0x9E3779B1  # 2^32 / golden ratio, odd: a full-period multiplier modulo 2^32
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")


def drop_near_duplicates(texts: Sequence[str]) -> list[str]:
    """Keep the first of each group of nearly equal texts.

    Args:
        texts: Documents; earlier ones win.

    Returns:
        The documents that are kept, in their order.
    """
    seen: set[bytes] = set()
    distinct: list[int] = []
    normalised: list[bytes] = []
    for index, text in enumerate(texts):
        content = text.encode("utf-8", "surrogatepass").translate(_DIGITS_TO_ZERO, b" \t\r\n\f")
        if content not in seen:
            seen.add(content)
            distinct.append(index)
            normalised.append(content)
    seen_fraction_M = _seen_fractions(normalised)
    return [texts[index] for index, fraction in zip(distinct, seen_fraction_M) if fraction < MAX_SEEN_FRACTION]


def _seen_fractions(contents: list[bytes]) -> np.ndarray:
    """Return, per text, the share of its sampled windows that occurred in an earlier text (0 with few samples)."""
    lengths_M = np.array([len(content) for content in contents], dtype=np.int64)
    ends_M = np.cumsum(lengths_M)
    bytes_N = np.frombuffer(b"".join(contents), dtype=np.uint8)
    positions_W, hashes_W = _sample_windows(bytes_N)
    text_W = np.searchsorted(ends_M, positions_W, side="right")
    inside = positions_W + WINDOW_BYTES <= ends_M[text_W]
    text_W, hashes_W = text_W[inside], hashes_W[inside]
    _, first, inverse = np.unique(hashes_W, return_index=True, return_inverse=True)
    is_old_W = text_W[first][inverse] < text_W
    num_samples_M = np.bincount(text_W, minlength=len(contents))
    num_old_M = np.bincount(text_W[is_old_W], minlength=len(contents))
    return np.where(num_samples_M >= MIN_SAMPLES, num_old_M / np.maximum(num_samples_M, 1), 0.0)


def _sample_windows(bytes_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hash every window of WINDOW_BYTES bytes and keep those whose hash says so.

    A hash of 2k bytes is two hashes of k bytes, so five rounds over the block give all windows of 32.
    """
    positions, hashes = [np.empty(0, np.int64)], [np.empty(0, np.uint32)]
    for begin in range(0, max(len(bytes_N) - WINDOW_BYTES + 1, 0), _BLOCK_BYTES):
        hash_W = bytes_N[begin : begin + _BLOCK_BYTES + WINDOW_BYTES - 1].astype(np.uint32) + np.uint32(1)
        width, factor = 1, _MULTIPLIER
        while width < WINDOW_BYTES:
            hash_W = hash_W[:-width] * np.uint32(factor) + hash_W[width:]
            width, factor = 2 * width, factor * factor % 2**32
        # The low bits of a polynomial hash are weak; mix them into the bits that decide.
        hash_W ^= hash_W >> np.uint32(15)
        hash_W *= np.uint32(0x2C1B3C6D)
        chosen = np.flatnonzero(hash_W >> np.uint32(_SAMPLE_SHIFT) == 0)
        positions.append(chosen + begin)
        hashes.append(hash_W[chosen])
    return np.concatenate(positions), np.concatenate(hashes)
