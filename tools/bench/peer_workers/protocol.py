"""What a worker of ``tools/bench/peers.py`` is told, the data it trains on, and how it answers.

A worker holds one implementation of one model. It is a process of its own, because peers may live in another
environment than this project, and because peak memory belongs to a process. The driver lets the workers take turns: one
word on standard input is one training step, one line of JSON is its answer. Nothing here imports an implementation.

Shape suffixes: B rows, S tokens of a row.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import numpy as np

STEP, QUIT = "step", "quit"


@dataclass(frozen=True)
class BenchSpec:
    """One model, its data and its place.

    Attributes:
        num_experts: Experts per layer; 0 for a dense model.
        top_k: Experts per token.
        ffn_hidden_size: Width of the dense feed-forward, or of one expert.
        vocab_size: Entries of the vocabulary.
        hidden_size: Width of the residual stream.
        num_layers: Blocks.
        num_heads: Attention heads, keys and values as many.
        num_rows: Rows per step and rank.
        row_tokens: Tokens of a row.
        document_tokens: Shortest and longest document that rows are packed from; ``None``: a row is one document.
        num_threads: Threads of this process.
        world_size: Processes; experts are split among them.
        seed: Of the data.
        variant: What the worker understands by it (which of its implementations).
    """

    num_experts: int = 0
    top_k: int = 0
    ffn_hidden_size: int = 1024
    vocab_size: int = 8192
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_rows: int = 2
    row_tokens: int = 1024
    document_tokens: tuple[int, int] | None = None
    num_threads: int = 2
    world_size: int = 1
    seed: int = 7
    variant: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens per step and rank."""
        return self.num_rows * self.row_tokens

    def to_json(self) -> str:
        """Write it as one word of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BenchSpec:
        """Read what :meth:`to_json` wrote."""
        values = json.loads(text)
        if values["document_tokens"] is not None:
            values["document_tokens"] = tuple(values["document_tokens"])
        return cls(**values)


def draw_batches(spec: BenchSpec, rank: int) -> Iterator[tuple[np.ndarray, list[list[int]]]]:
    """Draw the data, the same for every implementation.

    Args:
        spec: Sizes and seed.
        rank: This process.

    Yields:
        int64 token ids [B, S], and for each row the lengths of its documents, which add up to S.
    """
    random = np.random.default_rng((spec.seed, rank))
    while True:
        ids_BS = random.integers(0, spec.vocab_size, (spec.num_rows, spec.row_tokens), dtype=np.int64)
        yield ids_BS, [_draw_lengths(spec, random) for _ in range(spec.num_rows)]


def _draw_lengths(spec: BenchSpec, random: np.random.Generator) -> list[int]:
    if spec.document_tokens is None:
        return [spec.row_tokens]
    shortest, longest = spec.document_tokens
    lengths: list[int] = []
    while (room := spec.row_tokens - sum(lengths)) > 0:
        lengths.append(min(room, int(random.integers(shortest, longest + 1))))
    return lengths


class PeerAbsentError(RuntimeError):
    """The implementation is not installed, or cannot do what the case asks; the message says which."""


def serve(build: Callable[[BenchSpec, int], tuple[Callable[[], float], dict[str, Any]]]) -> None:
    """Be a worker: build, then answer each word of standard input until it ends.

    Args:
        build: Gets the specification and this rank; returns what makes one training step and returns its loss, and
            facts about the implementation (``version``, ``num_parameters``).
    """
    # Libraries print where they like; the answers have the descriptor to themselves.
    answers, sys.stdout = sys.stdout, sys.stderr
    spec, rank = BenchSpec.from_json(sys.argv[1]), int(sys.argv[2])
    try:
        step, facts = build(spec, rank)
    except PeerAbsentError as error:
        _answer(answers, {"absent": str(error)})
        return
    _answer(answers, facts)
    for line in sys.stdin:
        if line.strip() != STEP:
            break
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        loss = step()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        _answer(answers, {"wall_s": wall_s, "cpu_s": cpu_s, "loss": loss, "peak_bytes": peak_bytes()})


def peak_bytes() -> int:
    """Most resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _answer(stream: TextIO, values: dict[str, Any]) -> None:
    stream.write(json.dumps(values) + "\n")
    stream.flush()
