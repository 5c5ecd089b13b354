from contextlib import nullcontext

import pytest
import torch

from megatron_glue.backends.grouped_mm_cpu import GroupedMMOnCpu
from megatron_glue.ops.grouping import group_tokens
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.ops.matmul import TORCH_MATMUL
from megatron_glue.ops.permute import permute_rows, unpermute_rows
from tests.support.moe_cases import MoECase, dense_experts, random_rows
from tests.support.operator_watch import OperatorWatch
from tests.support.tolerances import assert_close

# Expert 1 idle, expert 2 with one row, and a last expert without rows.
COUNTS = torch.tensor([4, 0, 1, 6, 0])


def build(gated: bool = True):
    return MoECase(num_experts=5, gated=gated).build()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("way", ["grouped", "slices"])
def test_rows_in_expert_order_equal_the_dense_oracle(gated, way):
    layer = build(gated)
    x = random_rows(11, 8)
    reader = HostReader()
    if way == "grouped":
        y = layer.experts(x, COUNTS)
    else:
        y = layer.experts.forward_by_slice(x, COUNTS, reader)
        assert reader.count == 1
    experts_R = torch.arange(5).repeat_interleave(COUNTS)
    expected = dense_experts(layer, x)[torch.arange(11), experts_R]
    probe = random_rows(11, 8, seed=3).detach()
    targets = (x, *layer.experts.parameters())
    assert_close(y, expected)
    actual_grads = torch.autograd.grad(y, targets, probe)
    for actual, wanted in zip(actual_grads, torch.autograd.grad(expected, targets, probe), strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("way", ["grouped", "slices", "mask"])
def test_f55_idle_experts_get_zero_gradients_not_none(way):
    layer = build()
    x = random_rows(11, 8)
    if way == "grouped":
        y = layer.experts(x, COUNTS)
    elif way == "slices":
        y = layer.experts.forward_by_slice(x, COUNTS, HostReader())
    else:
        ids = torch.arange(5).repeat_interleave(COUNTS)[:, None]
        y = layer.experts.forward_by_mask(x, ids, torch.ones(11, 1), HostReader())
    y.sum().backward()
    for name, param in layer.experts.named_parameters():
        assert param.grad is not None, name
        busy = param.grad.flatten(1).abs().sum(1) > 0
        assert busy.tolist() == [True, False, True, True, False], name


@pytest.mark.parametrize("way", ["grouped", "slices"])
def test_f53_no_rows_at_all_still_reach_every_weight(way):
    layer = build()
    x = random_rows(0, 8)
    counts = torch.zeros(5, dtype=torch.int64)
    y = layer.experts(x, counts) if way == "grouped" else layer.experts.forward_by_slice(x, counts, HostReader())
    assert y.shape == (0, 8)
    y.sum().backward()
    for name, param in layer.experts.named_parameters():
        assert param.grad is not None, name
        assert not param.grad.any(), name


def test_mask_loop_equals_grouping_with_gradients():
    layer = build()
    x = random_rows(9, 8)
    ids = torch.tensor([[0, 3], [3, 2], [0, 2], [2, 0], [3, 0], [0, 3], [2, 3], [3, 2], [0, 2]])
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(2)).requires_grad_()
    reader = HostReader()
    by_mask = layer.experts.forward_by_mask(x, ids, weights, reader)
    assert reader.count == 5
    groups = group_tokens(ids, 5)
    rows = permute_rows(x, groups)
    by_group = unpermute_rows(layer.experts(rows, groups.counts_E), groups, weights)
    probe = random_rows(9, 8, seed=3).detach()
    targets = (x, weights, *layer.experts.parameters())
    assert_close(by_group, by_mask)
    for actual, wanted in zip(
        torch.autograd.grad(by_group, targets, probe), torch.autograd.grad(by_mask, targets, probe), strict=True
    ):
        assert_close(actual, wanted)


def test_bf16_activations_give_fp32_gradients_close_to_fp32():
    layer = build()
    x = random_rows(11, 8)
    exact = torch.autograd.grad(layer.experts(x, COUNTS).sum(), list(layer.experts.parameters()))
    low = layer.experts(x.bfloat16(), COUNTS)
    assert low.dtype == torch.bfloat16
    rounded = torch.autograd.grad(low.sum(), list(layer.experts.parameters()))
    for actual, wanted in zip(rounded, exact, strict=True):
        assert actual.dtype == torch.float32
        assert_close(actual, wanted, tolerance=2e-2)


def test_gate_and_up_are_two_parts_of_one_weight():
    """Distinct constants tell the order of the parts: silu(gate) * up is not symmetric."""
    layer = build()
    with torch.no_grad():
        layer.experts.gate_up_weight.zero_()
        layer.experts.gate_up_weight[:, 0, :, 0] = 3.0
        layer.experts.gate_up_weight[:, 1, :, 0] = -2.0
        layer.experts.down_weight.fill_(1.0)
    x = torch.zeros(5, 8)
    x[:, 0] = 1.0
    y = layer.experts(x, torch.ones(5, dtype=torch.int64))
    gate = torch.tensor(3.0)
    assert_close(y, torch.full((5, 8), float(12 * torch.nn.functional.silu(gate) * -2.0)))


def test_repeated_runs_are_bit_equal():
    layer = build()
    x = random_rows(11, 8)
    runs = []
    with OperatorWatch() as watch:
        for _ in range(2):
            y = layer.experts(x, COUNTS)
            runs.append((y, *torch.autograd.grad(y.square().sum(), (x, *layer.experts.parameters()))))
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))
    assert watch.calls


@pytest.mark.parametrize("way", ["grouped", "slices"])
@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 1, 3]])
def test_groups_of_experts_equal_all_of_them_at_once(way, sizes):
    """Rows and every gradient; a group may be without rows."""
    layer, x, reader = build(), random_rows(11, 8), HostReader()
    targets = (x, *layer.experts.parameters())
    probe = random_rows(11, 8, seed=3).detach()
    expected = layer.experts(x, COUNTS)
    wanted = torch.autograd.grad(expected, targets, probe)
    groups = (
        layer.experts.split(sizes, x.dtype)
        if way == "grouped"
        else layer.experts.split_by_slice(sizes, x.dtype, reader)
    )
    counts = COUNTS.split(sizes)
    rows = x.split([int(each.sum()) for each in counts])
    actual = torch.cat([compute(*each) for compute, *each in zip(groups, rows, counts, strict=True)])
    assert_close(actual, expected)
    for grad, wanted_grad in zip(torch.autograd.grad(actual, targets, probe), wanted, strict=True):
        assert_close(grad, wanted_grad)
    assert reader.count == (len(sizes) if way == "slices" else 0)


def test_slices_return_zeros_for_rows_that_are_nobodys():
    layer = build()
    x = random_rows(13, 8)
    y = layer.experts.forward_by_slice(x, COUNTS, HostReader())
    assert torch.equal(y[:11], layer.experts.forward_by_slice(x[:11], COUNTS, HostReader()))
    assert y.shape == x.shape
    assert not y[11:].any()


def test_experts_are_one_function_unless_what_is_between_their_products_is_rebuilt():
    layer, x, names = build(), random_rows(11, 8), []
    layer.experts._grouped_mm = GroupedMMOnCpu(TORCH_MATMUL)

    def rebuilt(function, between):
        names.append("rebuilt")
        return nullcontext(function(between))

    (fused,) = layer.experts.split([5], x.dtype)
    (apart,) = layer.experts.split([5], x.dtype, rebuilt)
    y_fused, y_apart = fused(x, COUNTS), apart(x, COUNTS)
    assert names == ["rebuilt"]
    assert "FeedForward" in type(y_fused.grad_fn).__name__
    assert "FeedForward" not in type(y_apart.grad_fn).__name__
    assert_close(y_fused, y_apart)
