"""Parts of an attention, their merge, and the three ways to compute one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_glue.backends import attention_blocks
from megatron_glue.backends.attention import AttentionDropout
from megatron_glue.backends.attention_blocks import (
    BlockInput,
    add_rows_,
    block_backward,
    block_forward,
    merge_,
    put_rows_,
    take_rows,
)
from megatron_glue.backends.attention_context_metadata import Block
from megatron_glue.types import PackedSequence
from tests.support.context_ranks import SplitAttention
from tests.support.layer_cases import KERNELS, build_metadata, random_qkv
from tests.support.tolerances import assert_close

PIECES, QUERIES, HEADS, GROUPS, WIDTH = 3, 5, 4, 2, 8
INF = float("-inf")


def given(
    num_keys: int, *, bias: bool = False, causal: bool = False, dropout: bool = False, seed: int = 0
) -> BlockInput:
    generator = torch.Generator().manual_seed(seed)
    rows = PIECES * QUERIES, PIECES * num_keys
    q, k, v = (
        torch.randn(count, heads, WIDTH, generator=generator, dtype=torch.float64)
        for count, heads in ((rows[0], HEADS), (rows[1], GROUPS), (rows[1], GROUPS))
    )
    bias_LK = torch.zeros(QUERIES, num_keys).masked_fill(torch.rand(QUERIES, num_keys, generator=generator) < 0.3, INF)
    bias_LK[:, 0] = 0.0
    block = Block(slice(0, rows[0]), slice(0, rows[1]), PIECES, True, causal, bias_LK if bias else None)
    tokens = torch.arange(rows[0]).view(PIECES, -1), torch.arange(rows[1]).view(PIECES, -1)
    return BlockInput(q, k, v, block, 0.3, (AttentionDropout(0.4, 9), *tokens) if dropout else None)


def explicitly(monkeypatch: pytest.MonkeyPatch, block: BlockInput, grad: Tensor) -> list[Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(attention_blocks, "HAS_FLASH_CPU", False)
        out, lse = block_forward(block)
        return [out, lse, *block_backward(grad, out, lse, block)]


@pytest.mark.parametrize("kind", [{}, {"bias": True}, {"causal": True}])
def test_products_written_out_equal_the_flash_kernel(kind: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    block = given(5, **kind)
    grad = torch.randn_like(block.q_BHC)
    out, lse = block_forward(block)
    flash = [out, lse, *block_backward(grad, out, lse, block)]
    for a, e in zip(flash, explicitly(monkeypatch, block, grad), strict=True):
        assert_close(a, e)


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("kind", [{}, {"bias": True}])
def test_backward_is_the_derivative_of_forward(kind: dict[str, bool], dropout: bool) -> None:
    block = given(7, dropout=dropout, **kind)
    leaves = [x.requires_grad_() for x in (block.q_BHC, block.k_NGC, block.v_NGC)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_blocks, "HAS_FLASH_CPU", False)
        out, lse = block_forward(block)
        grad = torch.randn_like(out)
        expected = torch.autograd.grad(out, leaves, grad)
        actual = block_backward(grad, out.detach(), lse.detach(), block)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)


def test_merging_parts_gives_the_whole() -> None:
    """Two stretches of keys, one after the other, against both at once; with the gradients from the final output."""
    first, second = given(4, seed=1), given(6, seed=2)
    second = BlockInput(first.q_BHC, second.k_NGC, second.v_NGC, second.block, 0.3, None)

    def both(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([x.unflatten(0, (PIECES, -1)) for x in (a, b)], dim=1).flatten(0, 1)

    block = Block(slice(0, 15), slice(0, 30), PIECES, True, False, None)
    k, v = both(first.k_NGC, second.k_NGC), both(first.v_NGC, second.v_NGC)
    whole = BlockInput(first.q_BHC, k, v, block, 0.3, None)
    expected = block_forward(whole)
    total = torch.empty(15, HEADS, WIDTH, dtype=torch.float64), torch.empty(15, HEADS, dtype=torch.float64)
    merge_(total, slice(0, 15), block_forward(first), is_new=True)
    merge_(total, slice(0, 15), block_forward(second), is_new=False)
    for a, e in zip(total, expected, strict=True):
        assert_close(a, e)
    grad = torch.randn_like(total[0])
    parts = [block_backward(grad, *total, part) for part in (first, second)]
    whole_grads = block_backward(grad, *expected, whole)
    assert_close(parts[0][0] + parts[1][0], whole_grads[0])
    for index in (1, 2):
        assert_close(both(parts[0][index], parts[1][index]), whole_grads[index])


def test_merging_touches_the_named_rows_alone() -> None:
    total = torch.full((6, 1, 2), 7.0), torch.zeros(6, 1)
    part = torch.ones(2, 1, 2), torch.zeros(2, 1)
    merge_(total, torch.tensor([4, 1]), part, is_new=False)
    assert total[0][:, 0, 0].tolist() == [7.0, 4.0, 7.0, 7.0, 4.0, 7.0]
    assert_close(total[1][:, 0], torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0]) * torch.log(torch.tensor(2.0)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the varlen kernel runs on CUDA only")
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("is_ring", [False, True], ids=["gather", "ring"])
@pytest.mark.parametrize("size", [2, 4])
def test_split_attention_with_the_varlen_kernel_equals_dense_with_gradients(
    size: int, is_ring: bool, window: int
) -> None:
    lengths = [5, 40, 38, 150, 1, 15, 16, 300]
    sequence = PackedSequence.from_lengths(lengths, 640 - sum(lengths))
    qkv = tuple(x.detach().to("cuda", torch.bfloat16) for x in random_qkv(640, 4, 2, 64))
    probe = torch.randn_like(qkv[0])
    actual = SplitAttention(sequence, size, 8, is_ring, is_varlen=True).run(qkv, probe, window=window, scale=0.125)
    leaves = [x.float().requires_grad_() for x in qkv]
    metadata = build_metadata("dense", sequence.to("cuda"), window)
    out = KERNELS["dense"](*leaves, metadata, window=window, scale=0.125, dropout=None)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, probe.float())]
    for a, e in zip(actual, expected, strict=True):
        assert_close(a.float(), e, tolerance=2e-2)


@pytest.mark.parametrize("rows", [slice(1, 3), torch.tensor([2, 0])])
def test_rows_are_a_stretch_or_indices(rows: slice | Tensor) -> None:
    x = torch.arange(8.0).view(4, 2)
    assert torch.equal(take_rows(x, rows), x[rows])
    values = torch.ones(2, 2, dtype=torch.float64)
    y, z = x.clone(), x.clone()
    put_rows_(y, rows, values)
    add_rows_(z, rows, values)
    x_put, x_added = x.clone(), x.clone()
    x_put[rows] = 1.0
    x_added[rows] += 1.0
    assert torch.equal(y, x_put)
    assert torch.equal(z, x_added)
    assert take_rows(x, slice(1, 3)).data_ptr() == x[1].data_ptr()
