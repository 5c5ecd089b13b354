#!/usr/bin/env python3
"""Forward and backward of packed attention, by way of computing it, on the documents of one pack.

Four ways, one answer: one call per document through autograd (``documents``), the segments backend (``segments``), a
boolean mask over the pack (``dense``, also the oracle), and the segments backend with its metadata built anew from the
device tensor in every call (``segments-uncached``). Times are the smallest of the repeats; the machine's other load
only adds to them. It is not a model: use it to compare the ways, not for tokens per second.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_glue.backends.attention_dense import dense_attention
from megatron_glue.backends.attention_segments import segments_attention
from megatron_glue.layers.packed_metadata import PackedMetadataCache
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.types import PackedSequence

EXAMPLE = """example:
  python tools/bench/packed_attention.py --tokens 1024 --documents 25 --threads 2"""


def draw_lengths(num_tokens: int, num_documents: int, seed: int) -> list[int]:
    """Draw document lengths of a log-normal shape (sigma 0.8) that fill a pack exactly."""
    weights = np.random.default_rng(seed).lognormal(0.0, 0.8, num_documents)
    lengths = np.maximum(1, (weights / weights.sum() * num_tokens).astype(np.int64))
    lengths[lengths.argmax()] += num_tokens - lengths.sum()
    return lengths.tolist()


def attend_by_document(qkv: tuple[Tensor, ...], lengths: list[int], scale: float) -> Tensor:
    """Call scaled dot-product attention once per document."""
    outs = []
    start = 0
    for length in lengths:
        q, k, v = (x[start : start + length].transpose(0, 1)[None] for x in qkv)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
        start += length
    return torch.cat(outs)


def build_ways(
    qkv: tuple[Tensor, ...], lengths: list[int], window: int, scale: float
) -> dict[str, Callable[[], Tensor]]:
    """Return the ways to attend, each as a function of nothing."""
    sequence = PackedSequence.from_lengths(lengths)
    caches = {
        (layout, enabled): PackedMetadataCache(layout, enabled, HostReader())
        for layout in ("segments", "dense")
        for enabled in (True, False)
    }

    def run(layout: str, enabled: bool) -> Tensor:
        kernel = segments_attention if layout == "segments" else dense_attention
        metadata = caches[layout, enabled].for_sequence(sequence, window)
        q, k, v = qkv
        return kernel(q, k, v, metadata, window=window, scale=scale, dropout=None)

    ways = {
        "segments": lambda: run("segments", True),
        "segments-uncached": lambda: run("segments", False),
        "dense": lambda: run("dense", True),
    }
    return ways if window else {"documents": lambda: attend_by_document(qkv, lengths, scale), **ways}


def measure(ways: dict[str, Callable[[], Tensor]], grad: Tensor, num_repeats: int) -> dict[str, float]:
    """Return the smallest time of each way in ms; the ways take turns, so that load falls on all alike."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(num_repeats):
        for name, attend in ways.items():
            start = time.perf_counter()
            attend().backward(grad)
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


def main() -> None:
    """Parse the command line, measure, print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the pack")
    parser.add_argument("--documents", type=int, default=25, help="documents in the pack")
    parser.add_argument("--heads", type=int, default=4, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=4, help="key/value heads")
    parser.add_argument("--head-dim", type=int, default=64, help="width of one head")
    parser.add_argument("--window", type=int, default=0, help="sliding window in tokens; off: 0")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads to compute with")
    parser.add_argument("--repeats", type=int, default=15, help="rounds over all ways")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths and the values")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    lengths = draw_lengths(arguments.tokens, arguments.documents, arguments.seed)
    heads = (arguments.heads, arguments.kv_heads, arguments.kv_heads)
    qkv = tuple(torch.randn(arguments.tokens, number, arguments.head_dim, requires_grad=True) for number in heads)
    grad = torch.randn(arguments.tokens, arguments.heads, arguments.head_dim)
    ways = build_ways(qkv, lengths, arguments.window, arguments.head_dim**-0.5)
    outs = {name: attend().detach() for name, attend in ways.items()}
    difference = max((out - outs["dense"]).abs().max().item() for out in outs.values())
    milliseconds = {name: round(value, 2) for name, value in measure(ways, grad, arguments.repeats).items()}
    print(json.dumps({"lengths": lengths, "largest_difference": difference, "forward_backward_ms": milliseconds}))


if __name__ == "__main__":
    main()
