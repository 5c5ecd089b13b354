"""Writes a few small documents for tools that need data which is the same on every machine and quick to read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

_WORDS = ("def", "return", "self", "value", "for", "in", "range", "None", "x", "index", "key", "=", "+", "(", ")")


def write_sample_documents(path: Path, num_documents: int, seed: int = 0) -> Path:
    """Write documents of skewed lengths, 1 to about 200 bytes, as JSONL.

    Args:
        path: The file.
        num_documents: Lines.
        seed: Of words and lengths.

    Returns:
        The file.
    """
    rng = np.random.default_rng(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_documents):
            count = int(min(rng.lognormal(2.0, 0.8), 40)) + 1
            file.write(json.dumps({"text": " ".join(rng.choice(_WORDS, count))}) + "\n")
    return path
