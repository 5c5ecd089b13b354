"""Attention over sequences that real ranks split, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_glue.backends.attention import AttentionDropout
from megatron_glue.backends.attention_context import ContextAttention
from megatron_glue.backends.attention_segments import segments_attention
from megatron_glue.parallel.context import GatherExchange, RingExchange
from megatron_glue.types import PackedSequence
from tests.support.context_ranks import REFUSE, context_metadata
from tests.support.layer_cases import build_metadata, random_qkv
from tests.support.processes import run_distributed
from tests.support.tolerances import assert_close

ALIGNMENT = 8
LENGTHS = [[5, 3, 7], [40, 1, 33, 8, 2, 150, 16], [1], []]
WINDOWS = [0, 9]
DROPOUT = AttentionDropout(0.3, 77)
SCALE = 8**-0.5


def sequences() -> list[PackedSequence]:
    """Micro-batches that follow each other: odd documents, many of them, one token, no token at all."""
    return [PackedSequence.from_lengths(lengths, 320 - sum(lengths), [3] * len(lengths)) for lengths in LENGTHS]


def probe_of(sequence: PackedSequence) -> Tensor:
    return torch.randn(sequence.num_tokens, 4, 8, generator=torch.Generator().manual_seed(5))


def attend(rank: int, size: int, is_ring: bool) -> list[list[Tensor]]:
    """Token ids, output and gradients of every case on this rank."""
    group = dist.group.WORLD
    assert group is not None
    exchange = RingExchange(group, rank, size) if is_ring else GatherExchange(group)
    kernel = ContextAttention(REFUSE, exchange)
    results = []
    for sequence in sequences():
        part = sequence.shard(rank, size, ALIGNMENT)
        assert part.token_ids_T is not None
        for window in WINDOWS:
            for dropout in (None, DROPOUT):
                q, k, v = (x.detach()[part.token_ids_T].requires_grad_() for x in random_qkv(sequence.num_tokens))
                metadata = context_metadata(part, window, is_ring)
                out = kernel(q, k, v, metadata, window=window, scale=SCALE, dropout=dropout)
                grads = torch.autograd.grad(out, (q, k, v), probe_of(sequence)[part.token_ids_T])
                results.append([part.token_ids_T, out.detach(), *grads])
    return results


@pytest.mark.parametrize("is_ring", [False, True], ids=["gather", "ring"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_equal_one_process(size: int, is_ring: bool) -> None:
    results = run_distributed(attend, size, is_ring)
    case = 0
    for sequence in sequences():
        for window in WINDOWS:
            for dropout in (None, DROPOUT):
                q, k, v = random_qkv(sequence.num_tokens)
                metadata = build_metadata("segments", sequence, window)
                out = segments_attention(q, k, v, metadata, window=window, scale=SCALE, dropout=dropout)
                expected = [out.detach(), *torch.autograd.grad(out, (q, k, v), probe_of(sequence))]
                order = torch.argsort(torch.cat([result[case][0] for result in results]))
                for index, value in enumerate(expected):
                    actual = torch.cat([result[case][index + 1] for result in results])[order]
                    assert_close(actual, value, what=f"case {case}, tensor {index}")
                case += 1
