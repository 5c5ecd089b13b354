import math

import pytest
import torch

from megatron_glue.ops.rope import apply_rope, rope_table, sinusoidal_table, split_and_rotate
from tests.support.tolerances import assert_close


def rotate_by_hand(x, positions, rotary_dim, base):
    """Rotate element pairs (i, i + R) with Python's own sines."""
    half = rotary_dim // 2
    out = x.clone()
    for token, position in enumerate(positions):
        for i in range(half):
            angle = position * base ** (-2 * i / rotary_dim)
            first, second = x[token, :, i], x[token, :, i + half]
            out[token, :, i] = first * math.cos(angle) - second * math.sin(angle)
            out[token, :, i + half] = second * math.cos(angle) + first * math.sin(angle)
    return out


@pytest.mark.parametrize("rotary_dim", [8, 4, 2])
def test_rotates_pairs_and_leaves_the_rest_of_the_head(rotary_dim):
    positions = [0, 1, 5, 200]
    cos, sin = rope_table(256, rotary_dim, 10000.0, "cpu")
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    actual = apply_rope(x, cos[positions].double(), sin[positions].double())
    assert_close(actual, rotate_by_hand(x, positions, rotary_dim, 10000.0), tolerance=1e-6)
    assert torch.equal(actual[..., rotary_dim:], x[..., rotary_dim:])


def test_scores_depend_on_the_distance_alone():
    cos, sin = rope_table(64, 16, 100.0, "cpu")
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(query_position, key_position):
        rotated = [apply_rope(x, cos[[p]], sin[[p]]) for x, p in ((q, query_position), (k, key_position))]
        return (rotated[0] * rotated[1]).sum()

    assert_close(score(40, 33), score(7, 0))


def test_table_stays_exact_at_long_positions():
    cos, _ = rope_table(131072, 4, 10000.0, "cpu")
    assert abs(cos[131071, 0].item() - math.cos(131071.0)) < 1e-7


def test_gradcheck_and_backward_keeps_no_activation():
    cos, sin = (table.double() for table in rope_table(5, 4, 10000.0, "cpu"))
    x = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, cos, sin), (x,))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        apply_rope(x, cos, sin)
    assert all(tensor.data_ptr() in (cos.data_ptr(), sin.data_ptr()) for tensor in kept)


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("queries_per_group", [1, 3])
def test_split_and_rotate_equals_its_parts(rotates, queries_per_group):
    cos, sin = rope_table(7, 4, 10000.0, "cpu")
    qkv = torch.randn(7, 2, queries_per_group + 2, 6, requires_grad=True)
    actual = split_and_rotate(qkv, cos, sin) if rotates else split_and_rotate(qkv)
    parts = (qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1])
    expected = [apply_rope(p, cos, sin) if rotates and i < 2 else p for i, p in enumerate(parts)]
    probes = [torch.randn_like(tensor) for tensor in expected]
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
        assert a.is_contiguous()
    (actual_grad,) = torch.autograd.grad(actual, qkv, probes)
    (expected_grad,) = torch.autograd.grad(expected, qkv, probes)
    assert_close(actual_grad, expected_grad)


def test_split_of_no_tokens_and_of_unused_outputs():
    qkv = torch.randn(0, 2, 3, 4, requires_grad=True)
    assert [tuple(t.shape) for t in split_and_rotate(qkv)] == [(0, 2, 4)] * 3
    qkv = torch.randn(5, 1, 3, 4, requires_grad=True)
    split_and_rotate(qkv)[2].sum().backward()
    assert qkv.grad is not None
    assert torch.equal(qkv.grad[:, :, :2], torch.zeros(5, 1, 2, 4))
    assert torch.equal(qkv.grad[:, :, 2], torch.ones(5, 1, 4))


def test_bf16_rounds_once():
    cos, sin = rope_table(32, 8, 10000.0, "cpu")
    x = torch.randn(32, 2, 8, dtype=torch.bfloat16)
    assert torch.equal(apply_rope(x, cos, sin), apply_rope(x.float(), cos, sin).bfloat16())


@pytest.mark.parametrize("width", [6, 7])
def test_sinusoidal_table(width):
    table = sinusoidal_table(50, width)
    assert table.shape == (50, width)
    even = width + width % 2
    for column in range(width):
        angle = 31 * 10000.0 ** (-(column - column % 2) / even)
        expected = math.cos(angle) if column % 2 else math.sin(angle)
        assert abs(table[31, column].item() - expected) < 1e-6
