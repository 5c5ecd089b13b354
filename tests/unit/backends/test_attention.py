"""Every attention backend against a token-by-token oracle, and what must hold for all of them."""

import pytest
import torch

from megatron_glue.backends import attention_segments
from megatron_glue.backends.attention import AttentionDropout
from megatron_glue.types import PackedSequence
from tests.support import oracles
from tests.support.layer_cases import KERNELS, PACKS, build_metadata, pack, random_qkv
from tests.support.operator_watch import OperatorWatch
from tests.support.tolerances import assert_close

SCALE = 8**-0.5
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="the varlen kernel runs on CUDA only")
TRAINABLE = ["segments", "dense"]
LAYOUTS = [*TRAINABLE, "flex"]


def attend(layout, qkv, sequence, window=0, dropout=None):
    metadata = build_metadata(layout, sequence, window)
    return KERNELS[layout](*qkv, metadata, window=window, scale=SCALE, dropout=dropout)


@pytest.fixture(params=["flash", "autograd"])
def path(request, monkeypatch):
    """Both ways through the segments kernel: the CPU's flash kernel, and autograd as on other devices."""
    if request.param == "autograd":
        monkeypatch.setattr(attention_segments, "HAS_FLASH_CPU", False)
    return request.param


@pytest.mark.parametrize("window", [0, 1, 7, 1000])
@pytest.mark.parametrize("name", PACKS)
def test_segments_equal_the_oracle_with_gradients(name, window, path):
    check_against_oracle("segments", pack(name), window)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("name", PACKS)
def test_dense_equals_the_oracle_with_gradients(name, window):
    check_against_oracle("dense", pack(name), window)


def check_against_oracle(layout, sequence, window):
    qkv = random_qkv(sequence.num_tokens, dtype=torch.float64)
    expected = oracles.packed_attention(*qkv, sequence, window=window, scale=SCALE)
    actual = attend(layout, qkv, sequence, window)
    assert_close(actual, expected)
    probe = torch.randn_like(expected)
    actual_grads = torch.autograd.grad(actual, qkv, probe, allow_unused=True, materialize_grads=True)
    expected_grads = torch.autograd.grad(expected, qkv, probe, allow_unused=True, materialize_grads=True)
    for a, e in zip(actual_grads, expected_grads, strict=True):
        assert_close(a, e)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("name", ["mixed", "one token", "only padding"])
def test_flex_forward_equals_the_oracle(name, window):
    sequence = pack(name)
    qkv = [tensor.detach() for tensor in random_qkv(sequence.num_tokens)]
    expected = oracles.packed_attention(*qkv, sequence, window=window, scale=SCALE)
    assert_close(attend("flex", qkv, sequence, window), expected)


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("name", PACKS)
def test_varlen_equals_dense_with_gradients(name, window):
    sequence = pack(name).to("cuda")
    leaves = [t.detach().to("cuda", torch.bfloat16).requires_grad_() for t in random_qkv(sequence.num_tokens)]
    actual = attend("varlen", leaves, sequence, window)
    expected = attend("dense", leaves, sequence, window)
    assert_close(actual, expected)
    probe = torch.randn_like(expected)
    for a, e in zip(
        torch.autograd.grad(actual, leaves, probe), torch.autograd.grad(expected, leaves, probe), strict=True
    ):
        assert_close(a, e)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_segments_equal_dense_in_fp32_for_any_number_of_kv_heads(groups, path):
    sequence = pack("mixed")
    qkv = random_qkv(sequence.num_tokens, 4, groups)
    actual, expected = (attend(layout, qkv, sequence) for layout in TRAINABLE)
    assert_close(actual, expected)
    probe = torch.randn_like(expected)
    for a, e in zip(torch.autograd.grad(actual, qkv, probe), torch.autograd.grad(expected, qkv, probe), strict=True):
        assert_close(a, e)


def test_segments_in_bf16():
    sequence = pack("mixed")
    qkv = [t.detach().bfloat16().requires_grad_() for t in random_qkv(sequence.num_tokens)]
    out = attend("segments", qkv, sequence, 7)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert_close(out.float(), attend("dense", [t.detach().float() for t in qkv], sequence, 7), tolerance=2e-2)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [[20, 33, 18], [150, 140]])
def test_f1_a_token_of_one_document_changes_no_bit_of_another(lengths, layout, window):
    sequence = PackedSequence.from_lengths(lengths, 2)
    in_b = slice(lengths[0], sum(lengths))
    results = []
    for changed in (False, True):
        qkv = random_qkv(sequence.num_tokens)
        with torch.no_grad():
            for tensor in qkv:
                tensor[3] += 100.0 * changed
        if layout == "flex":
            out = attend(layout, [tensor.detach() for tensor in qkv], sequence, window)
            results.append([out[in_b]])
            continue
        out = attend(layout, qkv, sequence, window)
        out[in_b].square().sum().backward()
        results.append([out[in_b], *(t.grad[in_b] for t in qkv)])
        # And no gradient of B reaches A.
        assert not any(t.grad[: lengths[0]].any() for t in qkv)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("layout", TRAINABLE)
def test_f1_nor_by_way_of_dropout(layout):
    sequence = PackedSequence.from_lengths([20, 33, 18])
    dropout = AttentionDropout(0.3, 17)
    outs = []
    for changed in (False, True):
        qkv = [tensor.detach() for tensor in random_qkv(sequence.num_tokens)]
        for tensor in qkv:
            tensor[3] += 100.0 * changed
        outs.append(attend(layout, qkv, sequence, dropout=dropout)[20:])
    assert torch.equal(*outs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mixed", "two long", "only padding"])
def test_f11_padding_reaches_nothing_and_gets_zeros(layout, name, path):
    sequence = pack(name)
    valid = sequence.num_valid_tokens
    qkv = random_qkv(sequence.num_tokens)
    clean = attend(layout, [t.detach() for t in qkv], sequence)
    with torch.no_grad():
        for tensor in qkv:
            tensor[valid:] = float("nan")
    if layout == "flex":
        out = attend(layout, [t.detach() for t in qkv], sequence)
    else:
        out = attend(layout, qkv, sequence)
        probe = torch.ones_like(out)
        probe[valid:] = float("nan")
        grads = torch.autograd.grad(out, qkv, probe, allow_unused=True, materialize_grads=True)
        for grad in grads:
            assert torch.isfinite(grad).all()
            assert not grad[valid:].any()
    assert torch.equal(out, clean)
    assert not out[valid:].any()


@pytest.mark.parametrize("layout", KERNELS)
@pytest.mark.parametrize("name", ["only padding", "nothing"])
def test_f26_no_valid_token_keeps_the_autograd_edge(layout, name):
    sequence = pack(name)
    qkv = random_qkv(sequence.num_tokens)
    out = attend(layout, qkv, sequence)
    assert out.shape == qkv[0].shape
    assert out.requires_grad
    out.sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in qkv)


@pytest.mark.parametrize("layout", TRAINABLE)
def test_f25_kernels_read_no_device_value(layout):
    sequence = pack("mixed")
    metadata = build_metadata(layout, sequence, 7)
    qkv = random_qkv(sequence.num_tokens)
    for dropout in (None, AttentionDropout(0.5, 1)):
        with OperatorWatch() as watch:
            KERNELS[layout](*qkv, metadata, window=7, scale=SCALE, dropout=dropout).sum().backward()
        assert watch.synchronising == []


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("name", ["mixed", "many short", "two long"])
def test_dropout_is_the_same_in_both_layouts(name, window):
    sequence = pack(name)
    dropout = AttentionDropout(0.4, 12345)
    qkv = random_qkv(sequence.num_tokens)
    outs = [attend(layout, qkv, sequence, window, dropout) for layout in TRAINABLE]
    assert_close(*outs)
    probe = torch.randn_like(outs[0])
    for a, e in zip(*(torch.autograd.grad(out, qkv, probe) for out in outs), strict=True):
        assert_close(a, e)
    assert not torch.allclose(outs[0], attend("dense", qkv, sequence, window))


def test_dropout_is_unbiased():
    sequence = PackedSequence.from_lengths([6])
    qkv = [t.detach() for t in random_qkv(6)]
    mean = torch.stack(
        [attend("dense", qkv, sequence, dropout=AttentionDropout(0.3, seed)) for seed in range(600)]
    ).mean(0)
    assert (mean - attend("dense", qkv, sequence)).abs().max() < 0.2


def test_dropout_of_a_part_of_the_heads_or_tokens_is_that_part_of_the_mask():
    sequence = PackedSequence.from_lengths([10, 20])
    q, k, v = (t.detach() for t in random_qkv(30))
    whole = attend("dense", (q, k, v), sequence, dropout=AttentionDropout(0.5, 3))
    heads = attend("dense", (q[:, 2:], k[:, 1:], v[:, 1:]), sequence, dropout=AttentionDropout(0.5, 3, first_head=2))
    assert_close(heads, whole[:, 2:])
    second = [t[10:] for t in (q, k, v)]
    tokens = attend(
        "segments", second, PackedSequence.from_lengths([20]), dropout=AttentionDropout(0.5, 3, first_token=10)
    )
    assert_close(tokens, whole[10:])


def test_flash_kernel_keeps_only_what_backward_needs():
    """No copy of queries, keys and values beside the ones the caller has, padded segments or not."""
    sequence = pack("many short")
    qkv = random_qkv(sequence.num_tokens)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        attend("segments", qkv, sequence)
    inputs = {t.data_ptr() for t in qkv}
    others = [t for t in kept if t.data_ptr() not in inputs]
    # The output, and one log-sum-exp per head and row.
    num_rows = sum(number * length for number, length in build_metadata("segments", sequence).pieces)
    assert sum(t.numel() for t in others) == qkv[0].numel() + num_rows * 4
