import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_glue.ops.grouping import group_tokens, replicate_groups
from megatron_glue.ops.permute import gather_rows, permute_rows, sum_replicas, unpermute_rows
from tests.support.operator_watch import OperatorWatch
from tests.support.tolerances import assert_close

NAN = float("nan")


def case(num_tokens: int, top_k: int, num_experts: int, *, lowest: int = 0, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(num_tokens * 100 + top_k * 10 + num_experts)
    ids = torch.randint(lowest, num_experts, (num_tokens, top_k), generator=generator)
    x = torch.randn(num_tokens, 3, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weights = torch.rand(num_tokens, top_k, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return ids, x, weights


@given(st.integers(0, 9), st.integers(1, 4), st.integers(1, 5), st.sampled_from([0, -1]))
@settings(max_examples=60, deadline=None)
def test_there_and_back_equals_a_loop_over_pairs(num_tokens, top_k, num_experts, lowest):
    """Values and gradients, with an "expert" that scales its rows by its id plus one."""
    ids, x, weights = case(num_tokens, top_k, num_experts, lowest=lowest)
    groups = group_tokens(ids, num_experts)
    scale = torch.repeat_interleave(torch.arange(1.0, num_experts + 1, dtype=x.dtype), groups.counts_E)
    scale = torch.cat([scale, torch.full((ids.numel() - scale.shape[0],), NAN, dtype=x.dtype)])
    y = unpermute_rows(permute_rows(x, groups) * scale[:, None], groups, weights)
    factor = ((ids + 1) * (ids >= 0)).to(x.dtype) * weights
    expected = x * factor.sum(1, keepdim=True)
    probe = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)
    # The NaN of the tail's scale meets a zero gradient there: only the incoming gradient of permute is poisoned.
    actual_grads = torch.autograd.grad((y * probe).sum(), (x, weights))
    expected_grads = torch.autograd.grad((expected * probe).sum(), (x, weights))
    assert_close(y, expected)
    for name, actual, wanted in zip(("x", "weights"), actual_grads, expected_grads, strict=True):
        assert_close(actual, wanted, what=name)


def test_gradcheck():
    ids, x, weights = case(5, 2, 3, lowest=-1)
    groups = group_tokens(ids, 3)
    assert torch.autograd.gradcheck(lambda x: permute_rows(x, groups)[: int(groups.offsets_E[-1])], (x,))
    y = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y, weights: unpermute_rows(y, groups, weights), (y, weights))
    dense_groups = group_tokens(ids.abs(), 3)
    assert torch.autograd.gradcheck(
        lambda x, weights: unpermute_rows(
            permute_rows(x, dense_groups, has_sentinels=False).sin(), dense_groups, weights, has_sentinels=False
        ),
        (x, weights),
    )


def test_f57_tail_is_never_read_in_either_direction():
    ids = torch.tensor([[0, -1], [2, 1], [1, -1]])
    groups = group_tokens(ids, 2)
    end = int(groups.offsets_E[-1])
    assert end == 3
    x = torch.randn(3, 4, requires_grad=True)
    poison = torch.zeros(6, 4)
    poison[end:] = NAN
    permute_rows(x, groups).backward(torch.ones(6, 4) + poison)
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [1.0, 1.0, 1.0]
    y = (torch.ones(6, 4) + poison).requires_grad_()
    weights = torch.ones(3, 2, requires_grad=True)
    out = unpermute_rows(y, groups, weights)
    out.sum().backward()
    assert out[:, 0].tolist() == [1.0, 1.0, 1.0]
    assert y.grad is not None
    assert weights.grad is not None
    assert y.grad[:, 0].tolist() == [1.0] * 3 + [0.0] * 3
    assert weights.grad.tolist() == [[4.0, 0.0], [0.0, 4.0], [4.0, 0.0]]


def test_all_dropped_gives_zeros():
    groups = group_tokens(torch.full((2, 2), -1), 3)
    y = torch.full((4, 3), NAN, requires_grad=True)
    out = unpermute_rows(y, groups, torch.ones(2, 2))
    assert out.tolist() == [[0.0] * 3] * 2


def test_f53_no_tokens_keep_their_autograd_edge():
    ids, x, weights = case(0, 2, 3)
    groups = group_tokens(ids, 3)
    out = unpermute_rows(permute_rows(x, groups), groups, weights)
    assert out.shape == (0, 3)
    out.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    assert weights.grad.shape == (0, 2)


def test_repeated_runs_are_bit_equal_and_nothing_scatters_or_waits():
    ids, x, weights = case(64, 4, 8, dtype=torch.float32)
    groups = group_tokens(ids, 8)
    results = []
    with OperatorWatch() as watch:
        for _ in range(2):
            y = unpermute_rows(permute_rows(x, groups).sin(), groups, weights)
            results.append((y, *torch.autograd.grad(y.square().sum(), (x, weights))))
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
    assert watch.synchronising == []
    assert not [name for name in watch.calls if "scatter" in name or "index_add" in name or "index_put" in name]


def test_bf16_sums_in_fp32():
    """Eight choices of one token: a bf16 running sum would lose the small ones."""
    groups = group_tokens(torch.arange(8)[None], 8)
    y = torch.tensor([[256.0]] + [[0.5]] * 7, dtype=torch.bfloat16)
    out = unpermute_rows(y, groups, torch.ones(1, 8, dtype=torch.bfloat16))
    assert out.item() == torch.tensor(259.5).bfloat16().item()


def test_gather_rows_is_a_permutation_with_a_gathering_backward():
    index = torch.tensor([2, 0, 1])
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(gather_rows(x, index, index.argsort()), x[index])
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, index, index.argsort()), (x,))


def test_wrong_number_of_tokens_is_refused():
    groups = group_tokens(torch.zeros(3, 2, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="4 tokens"):
        permute_rows(torch.zeros(4, 2), groups)
    with pytest.raises(ValueError, match="4 tokens"):
        unpermute_rows(torch.zeros(6, 2), groups, torch.zeros(4, 2))


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_replicas_there_and_back(num_tokens):
    """Each replica brings its share of the result: a token's rows, shares and choices all add up, in both passes."""
    ids, x, weights = case(num_tokens, 2, 4)
    groups = group_tokens(ids, 4, num_ranks=2)
    replicated = replicate_groups(groups, 3)
    rows = permute_rows(x, replicated.groups, has_sentinels=False)
    assert torch.equal(rows, permute_rows(x, groups, has_sentinels=False)[replicated.source_S])
    share = torch.linspace(1, 2, rows.shape[0], dtype=x.dtype)[:, None]
    out = unpermute_rows(sum_replicas(rows * share, replicated), groups, weights, has_sentinels=False)
    share_TK = share[replicated.groups.inverse_N].view(num_tokens, 2, 3).sum(-1)
    expected = x * (share_TK * weights).sum(1, keepdim=True)
    assert_close(out, expected)
    probe = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)
    actual_grads = torch.autograd.grad((out * probe).sum(), (x, weights))
    expected_grads = torch.autograd.grad((expected * probe).sum(), (x, weights))
    for name, actual, wanted in zip(("x", "weights"), actual_grads, expected_grads, strict=True):
        assert_close(actual, wanted, what=name)
