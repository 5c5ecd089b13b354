"""Long segments by blocks against the flash kernel and the oracle, in values and gradients."""

import pytest
import torch

from megatron_glue.backends.attention_long import LongSegmentAttention, padded_length
from megatron_glue.backends.attention_segments import SegmentsAttention, segments_attention
from megatron_glue.backends.core_pool import CorePool
from megatron_glue.backends.matmul_onednn import OnednnMatMul
from megatron_glue.ops.matmul import TORCH_MATMUL
from megatron_glue.types import PackedSequence
from tests.support import oracles
from tests.support.layer_cases import build_metadata
from tests.support.tolerances import assert_close, relative_norm

SCALE = 8**-0.5
MATMULS = {"torch": TORCH_MATMUL, "onednn": OnednnMatMul()}
PACKS = [([1], 0), ([257], 3), ([256, 40], 0), ([5, 300, 7, 513], 9), ([30, 30, 30], 0)]


def gradients(kernel, qkv, metadata, window, probe):
    out = kernel(*qkv, metadata, window=window, scale=SCALE, dropout=None)
    return out, *torch.autograd.grad(out, qkv, probe)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (2, 1)])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(("lengths", "num_pad"), PACKS)
@pytest.mark.parametrize("matmul", MATMULS.values(), ids=MATMULS)
def test_equals_the_flash_kernel_with_gradients(matmul, lengths, num_pad, window, heads):
    sequence = PackedSequence.from_lengths(lengths, num_pad)
    kernel = SegmentsAttention(LongSegmentAttention(matmul, CorePool(), min_tokens=1))
    qkv = [torch.randn(sequence.num_tokens, count, 8, requires_grad=True) for count in (heads[0], heads[1], heads[1])]
    metadata = build_metadata("segments", sequence, window)
    probe = torch.randn(sequence.num_tokens, heads[0], 8)
    expected = gradients(segments_attention, qkv, metadata, window, probe)
    for actual, wanted in zip(gradients(kernel, qkv, metadata, window, probe), expected, strict=True):
        assert_close(actual, wanted)


def test_equals_the_oracle():
    sequence = PackedSequence.from_lengths([270])
    qkv = tuple(torch.randn(270, 2, 8) for _ in range(3))
    kernel = SegmentsAttention(LongSegmentAttention(TORCH_MATMUL, CorePool(), min_tokens=1))
    actual = kernel(*qkv, build_metadata("segments", sequence, 0), window=0, scale=SCALE, dropout=None)
    assert_close(actual, oracles.packed_attention(*qkv, sequence, window=0, scale=SCALE))


def test_f1_another_segment_changes_no_bit_on_any_number_of_threads():
    sequence = PackedSequence.from_lengths([300, 400])
    kernel = SegmentsAttention(LongSegmentAttention(OnednnMatMul(), CorePool(), min_tokens=1))
    metadata = build_metadata("segments", sequence, 0)
    qkv = [torch.randn(700, 2, 8) for _ in range(3)]
    changed = [x.clone() for x in qkv]
    for x in changed:
        x[:300] += 1.0
    before, outs = torch.get_num_threads(), []
    try:
        for num_threads, inputs in ((1, qkv), (2, changed)):
            torch.set_num_threads(num_threads)
            leaves = [x.clone().requires_grad_() for x in inputs]
            outs.append([x[300:] for x in gradients(kernel, leaves, metadata, 0, torch.ones(700, 2, 8))])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_large_scores_are_as_exact_as_the_flash_kernels():
    """Scores of some hundreds, one probability per row near 1: both against fp64, where rounding is inherent."""
    sequence = PackedSequence.from_lengths([300])
    kernel = SegmentsAttention(LongSegmentAttention(OnednnMatMul(), CorePool(), min_tokens=1))
    qkv = [(torch.randn(300, 2, 8) * 10).requires_grad_() for _ in range(3)]
    exact_qkv = [x.detach().double().requires_grad_() for x in qkv]
    metadata, probe = build_metadata("segments", sequence, 0), torch.randn(300, 2, 8)
    exact = gradients(segments_attention, exact_qkv, metadata, 0, probe.double())
    flash = gradients(segments_attention, qkv, metadata, 0, probe)
    for actual, other, wanted in zip(gradients(kernel, qkv, metadata, 0, probe), flash, exact, strict=True):
        assert relative_norm(actual, wanted) <= 3 * relative_norm(other, wanted) < 1e-3


@pytest.mark.parametrize("min_tokens", [1, 1000])
def test_a_second_derivative_is_refused_and_inference_mode_works(min_tokens):
    sequence = PackedSequence.from_lengths([40])
    kernel = SegmentsAttention(LongSegmentAttention(OnednnMatMul(), CorePool(), min_tokens=min_tokens))
    metadata = build_metadata("segments", sequence, 0)
    qkv = [torch.randn(40, 2, 8, requires_grad=True) for _ in range(3)]
    out = kernel(*qkv, metadata, window=0, scale=SCALE, dropout=None)
    (grad,) = torch.autograd.grad(out.square().sum(), qkv[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    with torch.inference_mode():
        inferred = kernel(*(x.detach() for x in qkv), metadata, window=0, scale=SCALE, dropout=None)
    assert torch.equal(inferred, out)


def test_lengths_come_in_few_sizes():
    """oneDNN keeps a compiled kernel for each: 128 lengths of documents once took 700 MiB."""
    sizes = [padded_length(length) for length in range(1, 4097)]
    assert len(set(sizes)) == 16 + 12
    assert all(length <= size < length + 256 for length, size in enumerate(sizes, start=1))
