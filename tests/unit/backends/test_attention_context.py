"""Attention over split sequences against the kernel of one rank, with ranks as threads."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_glue.backends import attention_blocks
from megatron_glue.backends.attention import AttentionDropout
from megatron_glue.backends.attention_context import ContextAttention, add_context_parallel
from megatron_glue.backends.attention_context_metadata import Block, VarlenBlock
from megatron_glue.backends.registry import resolve
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import BackendConfig
from megatron_glue.types import PackedSequence
from tests.support.context_ranks import REFUSE, SplitAttention, context_metadata, on_context_ranks
from tests.support.layer_cases import KERNELS, build_metadata, random_qkv
from tests.support.operator_watch import OperatorWatch
from tests.support.tolerances import assert_close

SCALE = 0.3
# Lengths of segments, for an alignment of 8: long, short, shorter than the alignment, one token, none.
CASES: dict[str, list[int]] = {
    "odd": [5, 3, 7],
    "mixed": [40, 1, 33, 8, 2, 150, 16, 17],
    "one token each": [1, 1, 1],
    "one long": [203],
    "nothing": [],
}
RINGS = pytest.mark.parametrize("is_ring", [False, True], ids=["gather", "ring"])
PATHS = ["flash", "explicit", "varlen"]


def whole(lengths: list[int], alignment: int = 8, starts: list[int] | None = None) -> PackedSequence:
    """A layout with room for the aligned segments, and some more."""
    places = sum(-(-length // alignment) * alignment for length in lengths) + 2 * alignment
    return PackedSequence.from_lengths(lengths, places - sum(lengths), starts)


def on_one_rank(
    qkv: tuple[Tensor, ...],
    probe: Tensor,
    sequence: PackedSequence,
    window: int = 0,
    dropout: AttentionDropout | None = None,
) -> list[Tensor]:
    """Output and gradients of the dense kernel."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    metadata = build_metadata("dense", sequence, window)
    out = KERNELS["dense"](*leaves, metadata, window=window, scale=SCALE, dropout=dropout)
    return [out.detach(), *torch.autograd.grad(out, leaves, probe)]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Compare output and gradients; where the right value is zero, such as with one key per query, rounding is."""
    for a, e, what in zip(actual, expected, ["out", "q", "k", "v"], strict=True):
        if e.norm() > 1e-12:
            assert_close(a, e, what=what)
        else:
            assert a.norm() < 1e-12, what


def varlen_forward(q, k, v, cu_q, cu_k, max_q, max_k, p, is_causal, debug, *, scale, **window):
    """What the CUDA kernel computes: the last query of a piece is aligned with its last key."""
    outs, lses = [], []
    for (qa, qb), (ka, kb) in zip(bounds(cu_q, max_q), bounds(cu_k, max_k), strict=True):
        scores = masked_scores(q[qa:qb], k[ka:kb], scale, is_causal, **window)
        lse = torch.logsumexp(scores, -1)
        heads = v[ka:kb].repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(0, 1)
        outs.append(((scores - lse[..., None]).exp() @ heads).transpose(0, 1))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1), None, None, None


def varlen_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, p, is_causal, state, unused, *, scale, **window):
    """Its gradient, given the final output and log-sum-exp [H, rows]."""
    assert grad.is_contiguous()
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert lse.shape == (q.shape[1], q.shape[0])
    grads = []
    for (qa, qb), (ka, kb) in zip(bounds(cu_q, max_q), bounds(cu_k, max_k), strict=True):
        leaves = [x.detach().requires_grad_() for x in (q[qa:qb], k[ka:kb], v[ka:kb])]
        with torch.enable_grad():
            probs = (masked_scores(leaves[0], leaves[1], scale, is_causal, **window) - lse[:, qa:qb, None]).exp()
            heads = leaves[2].repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(0, 1)
            value = ((probs @ heads).transpose(0, 1) * grad[qa:qb]).sum()
            value = value - (probs.sum(-1).transpose(0, 1) * (grad * out).sum(-1)[qa:qb]).sum()
        grads.append(torch.autograd.grad(value, leaves))
    return tuple(torch.cat(parts) for parts in zip(*grads, strict=True))


def bounds(cu: Tensor, longest: int) -> list[tuple[int, int]]:
    edges = cu.tolist()
    assert cu.dtype == torch.int32
    lengths = [b - a for a, b in itertools.pairwise(edges)]
    assert min(lengths) >= 1, "F9: no empty piece"
    assert max(lengths) == longest
    return list(itertools.pairwise(edges))


def masked_scores(q, k, scale, is_causal, window_size_left, window_size_right):
    scores = (q.transpose(0, 1) @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).permute(1, 2, 0)) * scale
    ahead = torch.arange(len(q))[:, None] + (len(k) - len(q)) - torch.arange(len(k))
    hidden = torch.zeros(ahead.shape, dtype=torch.bool)
    if is_causal or window_size_right == 0:
        hidden |= ahead < 0
    if window_size_left >= 0:
        hidden |= ahead > window_size_left
    return scores.masked_fill(hidden, float("-inf"))


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """The three ways of computing a block: the CPU's flash kernel, products, and a stand-in for the CUDA kernel."""
    if request.param == "explicit":
        monkeypatch.setattr(attention_blocks, "HAS_FLASH_CPU", False)
    monkeypatch.setattr(attention_blocks, "VARLEN_FORWARD", varlen_forward)
    monkeypatch.setattr(attention_blocks, "VARLEN_BACKWARD", varlen_backward)
    return request.param


@RINGS
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("window", [0, 1, 7, 1000])
@pytest.mark.parametrize("name", CASES)
def test_split_sequences_equal_whole_ones_with_gradients(name, window, size, is_ring, path):
    sequence = whole(CASES[name])
    qkv = random_qkv(sequence.num_tokens, dtype=torch.float64)
    probe = torch.randn_like(qkv[0])
    split = SplitAttention(sequence, size, 8, is_ring, path == "varlen")
    actual = split.run(qkv, probe, window=window, scale=SCALE)
    assert_same(actual, on_one_rank(qkv, probe, sequence, window))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 60), max_size=6),
    st.sampled_from([(2, 4), (2, 12), (3, 6), (4, 8), (4, 16)]),
    st.integers(0, 40),
    st.booleans(),
    st.booleans(),
)
def test_any_lengths_ranks_and_window(lengths, ranks, window, is_ring, is_varlen):
    size, alignment = ranks
    sequence = whole(lengths, size * alignment)
    qkv = random_qkv(sequence.num_tokens, 2, 1, 4, dtype=torch.float64)
    probe = torch.randn_like(qkv[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_blocks, "VARLEN_FORWARD", varlen_forward)
        patch.setattr(attention_blocks, "VARLEN_BACKWARD", varlen_backward)
        actual = SplitAttention(sequence, size, alignment, is_ring, is_varlen).run(qkv, probe, window=window)
    assert_same(actual, on_one_rank(qkv, probe, sequence, window))


@RINGS
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_any_number_of_kv_heads_in_fp32(groups, is_ring):
    sequence = whole(CASES["mixed"])
    qkv = random_qkv(sequence.num_tokens, 4, groups)
    probe = torch.randn_like(qkv[0])
    actual = SplitAttention(sequence, 2, 8, is_ring).run(qkv, probe)
    for a, e in zip(actual, on_one_rank(qkv, probe, sequence), strict=True):
        assert_close(a, e)


@RINGS
def test_bf16(is_ring):
    sequence = whole(CASES["mixed"])
    qkv = tuple(x.detach().bfloat16() for x in random_qkv(sequence.num_tokens))
    probe = torch.randn(qkv[0].shape).bfloat16()
    actual = SplitAttention(sequence, 4, 8, is_ring).run(qkv, probe, window=20)
    expected = on_one_rank(tuple(x.float() for x in qkv), probe.float(), sequence, 20)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert_close(a.float(), e, tolerance=2e-2)


@RINGS
def test_f7_boundaries_do_not_depend_on_where_a_chunk_starts(is_ring):
    sequences = [whole([40, 21], starts=starts) for starts in (None, [5, 400])]
    qkv = random_qkv(sequences[0].num_tokens)
    probe = torch.randn_like(qkv[0])
    first, second = (SplitAttention(sequence, 2, 8, is_ring).run(qkv, probe, window=9) for sequence in sequences)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@RINGS
@pytest.mark.parametrize("window", [0, 9])
def test_f1_a_token_of_one_document_changes_no_bit_of_another(window, is_ring, path):
    sequence = whole([20, 33, 18, 64])
    in_b = slice(20, 53)
    probe = torch.zeros(sequence.num_tokens, 4, 8)
    probe[in_b] = torch.randn(33, 4, 8)
    results = []
    for changed in (False, True):
        qkv = random_qkv(sequence.num_tokens)
        with torch.no_grad():
            for tensor in qkv:
                tensor[3] += 100.0 * changed
                tensor[60] += 100.0 * changed
        results.append(SplitAttention(sequence, 2, 8, is_ring, path == "varlen").run(qkv, probe, window=window))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[in_b], b[in_b])
    for grad in results[0][1:]:
        assert not grad[:20].any()
        assert not grad[53:].any()


@RINGS
def test_f11_padding_reaches_nothing_and_gets_zeros(is_ring, path):
    sequence = whole([13, 3, 30])
    valid = sequence.num_valid_tokens
    qkv = random_qkv(sequence.num_tokens)
    probe = torch.randn_like(qkv[0])
    split = SplitAttention(sequence, 2, 8, is_ring, path == "varlen")
    clean = split.run(qkv, probe)
    poisoned = [x.detach().clone() for x in (*qkv, probe)]
    for tensor in poisoned:
        tensor[valid:] = float("nan")
    results = split.run(tuple(poisoned[:3]), poisoned[3])
    for a, b in zip(results, clean, strict=True):
        assert torch.equal(a, b)
        assert not a[valid:].any()


@RINGS
@pytest.mark.parametrize("lengths", [[1], [1, 1], []])
def test_f26_f53_a_rank_without_a_token_keeps_its_edges(lengths, is_ring):
    sequence = whole(lengths)

    def on_rank(rank, exchange):
        part = sequence.shard(rank, 4, 8)
        qkv = random_qkv(part.num_tokens)
        metadata = context_metadata(part, 0, is_ring)
        out = ContextAttention(REFUSE, exchange)(*qkv, metadata, window=0, scale=SCALE, dropout=None)
        assert out.requires_grad
        out.sum().backward()
        assert all(x.grad is not None for x in qkv)
        return part.num_valid_tokens

    assert on_context_ranks(4, is_ring, on_rank) == [len(lengths), 0, 0, 0]


@RINGS
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("name", ["mixed", "odd"])
def test_dropout_drops_the_same_probabilities_as_on_one_rank(name, window, is_ring):
    sequence = whole(CASES[name])
    dropout = AttentionDropout(0.4, 12345, first_head=2)
    qkv = random_qkv(sequence.num_tokens, dtype=torch.float64)
    probe = torch.randn_like(qkv[0])
    # The whole kernel computes dropout in fp32.
    expected = on_one_rank(qkv, probe, sequence, window, dropout)
    actual = SplitAttention(sequence, 4, 8, is_ring).run(qkv, probe, window=window, dropout=dropout)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, tolerance=1e-5)
    assert not torch.allclose(expected[0], on_one_rank(qkv, probe, sequence, window)[0])


def pairs_computed(part: PackedSequence, window: int, is_ring: bool) -> list[int]:
    """Score pairs of each step, masked ones included."""
    counts = []
    for blocks in context_metadata(part, window, is_ring).steps:
        total = 0
        for block in blocks:
            assert isinstance(block, Block)
            queries, keys = (
                rows.stop - rows.start if isinstance(rows, slice) else len(rows)
                for rows in (block.query_rows, block.key_rows)
            )
            total += queries * keys // block.num_pieces
        counts.append(total)
    return counts


@pytest.mark.parametrize("size", [2, 4])
def test_no_block_that_is_hidden_as_a_whole_is_computed_and_ranks_have_equal_shares(size):
    length, piece = 64 * size, 32
    sequence = PackedSequence.from_lengths([length])
    for is_ring in (False, True):
        counts = [pairs_computed(sequence.shard(rank, size, 8), 0, is_ring) for rank in range(size)]
        # Every rank the same; in a ring in every step: two blocks of piece x piece, the own step its square.
        assert len({sum(of_rank) for of_rank in counts}) == 1
        if is_ring:
            assert all(of_rank == [4 * piece**2] + [2 * piece**2] * (size - 1) for of_rank in counts)
        # Of all pairs half is visible; beside it only the upper half of diagonal blocks is touched.
        assert sum(map(sum, counts)) <= length * (length + 1) // 2 + size * 2 * piece**2


def test_a_window_leaves_out_what_it_hides():
    sequence = PackedSequence.from_lengths([256])
    for is_ring in (False, True):
        counts = [sum(pairs_computed(sequence.shard(rank, 2, 8), 16, is_ring)) for rank in range(2)]
        assert max(counts) < 3 * 64 * (64 + 16)


@RINGS
def test_varlen_has_one_call_per_half_or_step(is_ring):
    part = whole(CASES["mixed"]).shard(1, 2, 8)
    steps = context_metadata(part, 0, is_ring, is_varlen=True).steps
    assert [len(blocks) for blocks in steps] == ([1, 1] if is_ring else [2])
    assert all(isinstance(block, VarlenBlock) for blocks in steps for block in blocks)


@RINGS
def test_f25_building_and_attending_read_no_device_value(is_ring):
    sequence = whole(CASES["mixed"])

    def on_rank(rank, exchange):
        part = sequence.shard(rank, 2, 8)
        qkv = random_qkv(part.num_tokens)
        with OperatorWatch() as watch:
            for window in (0, 7):
                metadata = context_metadata(part, window, is_ring)
                out = ContextAttention(REFUSE, exchange)(*qkv, metadata, window=window, scale=SCALE, dropout=None)
                out.sum().backward()
        return watch.synchronising

    assert on_context_ranks(2, is_ring, on_rank) == [[], []]


@RINGS
def test_backward_keeps_what_is_this_ranks_own(is_ring):
    """No key or value of another rank, and no copy of its own, lives from forward to backward."""
    sequence = whole(CASES["mixed"])

    def on_rank(rank, exchange):
        part = sequence.shard(rank, 2, 8)
        qkv = random_qkv(part.num_tokens)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            metadata = context_metadata(part, 0, is_ring)
            ContextAttention(REFUSE, exchange)(*qkv, metadata, window=0, scale=SCALE, dropout=None)
        inputs = {x.untyped_storage().data_ptr() for x in qkv}
        others = [x for x in kept if x.untyped_storage().data_ptr() not in inputs]
        return sum(x.numel() for x in others) - part.num_valid_tokens * 4 * (8 + 1)

    # The output, and one log-sum-exp per head and query.
    assert on_context_ranks(2, is_ring, on_rank) == [0, 0]


def test_a_whole_micro_batch_goes_to_the_kernel_of_one_rank():
    sequence = PackedSequence.from_lengths([20, 5], 3)
    qkv = random_qkv(28)
    kernel = ContextAttention(KERNELS["segments"], exchange=on_context_ranks(2, True, lambda _, e: e)[0])
    metadata = build_metadata("segments", sequence)
    arguments: dict[str, Any] = {"window": 0, "scale": SCALE, "dropout": None}
    assert torch.equal(kernel(*qkv, metadata, **arguments), KERNELS["segments"](*qkv, metadata, **arguments))


def backends_of(name: str):
    return resolve(BackendConfig.model_validate({"attention_backend": name}), "cpu", torch.float32, head_dim=8)


@RINGS
def test_the_registry_hands_the_kernel_out_and_says_so(is_ring):
    exchange = on_context_ranks(2, is_ring, lambda _, e: e)[0]
    plain = backends_of("auto")
    backends = add_context_parallel(plain, exchange)
    assert isinstance(backends.attention, ContextAttention)
    assert backends.attention.plain is plain.attention
    assert (plain.context_layout, backends.context_layout) == ("", "ring" if is_ring else "gather")
    assert f"context {backends.context_layout}" in backends.describe()
    assert backends.attention_layout == plain.attention_layout == "segments"
    assert add_context_parallel(plain, None) is plain


@pytest.mark.parametrize("name", ["dense", "flex", "te"])
def test_kernels_that_cannot_are_refused(name):
    exchange = on_context_ranks(2, False, lambda _, e: e)[0]
    plain = replace(backends_of("dense"), attention_layout=name)
    with pytest.raises(ConfigError, match=f"--attention-backend={name}: .*use auto"):
        add_context_parallel(plain, exchange)


def test_a_ring_with_windows_says_what_it_lacks():
    plain = replace(backends_of("segments"), attention_layout="varlen")
    for is_ring in (False, True):
        exchange = on_context_ranks(2, is_ring, lambda _, e: e)[0]
        text = add_context_parallel(plain, exchange, has_window=True).describe()
        assert ("allgather has a kernel for them" in text) is is_ring
