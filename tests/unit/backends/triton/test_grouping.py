import pytest
import torch

from megatron_glue.ops.grouping import group_tokens
from tests.support.operator_watch import OperatorWatch
from tests.support.triton_kernels import kernel_device

FIELDS = ("order_N", "inverse_N", "counts_E", "offsets_E", "rank_splits_P")


@pytest.fixture(scope="module")
def group_pairs():
    kernel_device()
    from megatron_glue.backends.triton.grouping import group_pairs

    return group_pairs


def assert_equals_the_oracle(group_pairs, ids_TK, num_experts, num_ranks=1):
    expected = group_tokens(ids_TK, num_experts, num_ranks=num_ranks, method="loop")
    actual = group_tokens(ids_TK.to(kernel_device()), num_experts, num_ranks=num_ranks, implementation=group_pairs)
    assert actual.top_k == expected.top_k
    for name in FIELDS:
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "num_ranks"),
    [
        (0, 2, 4, 2),
        (1, 1, 1, 1),
        (37, 3, 12, 4),
        (255, 2, 5, 1),
        (256, 2, 6, 2),
        (257, 2, 7, 7),
        (1100, 1, 8, 2),
    ],
)
def test_equals_the_oracle_with_sentinels(group_pairs, num_tokens, top_k, num_experts, num_ranks):
    """Both sides of a block of 512 pairs, and several blocks."""
    generator = torch.Generator().manual_seed(num_tokens)
    ids_TK = torch.randint(-2, num_experts + 2, (num_tokens, top_k), generator=generator)
    assert_equals_the_oracle(group_pairs, ids_TK, num_experts, num_ranks)


@pytest.mark.parametrize(
    ("ids", "num_experts"),
    [([3] * 700, 4), ([-1] * 600, 3), ([4, -1] * 300, 4), ([-(2**62), 2**62, 1], 2), ([5], 300)],
    ids=["all to one", "all dropped", "both sentinels", "far sentinels", "mostly empty"],
)
def test_corner_cases(group_pairs, ids, num_experts):
    assert_equals_the_oracle(group_pairs, torch.tensor(ids), num_experts)


def test_more_experts_than_one_tile_of_the_scan(group_pairs, monkeypatch):
    """Offsets carry over from tile to tile, inside a rank and before it; so do the counts of blocks."""
    from megatron_glue.backends.triton import grouping

    monkeypatch.setattr(grouping, "_TILE", 4)
    ids_TK = torch.randint(-1, 22, (1300, 2), generator=torch.Generator().manual_seed(0))
    assert_equals_the_oracle(group_pairs, ids_TK, 22, 2)


def test_any_dtype_and_stride_is_read_and_left_alone(group_pairs):
    ids_TK = torch.tensor([[2, -1, 7], [9, 0, 1], [1, 1, 2]], dtype=torch.int16)
    before = ids_TK.clone()
    assert_equals_the_oracle(group_pairs, ids_TK[:, 0], 3)
    assert_equals_the_oracle(group_pairs, ids_TK.t(), 3)
    assert torch.equal(ids_TK, before)


def test_repeated_runs_are_equal_and_never_wait(group_pairs):
    ids_TK = torch.randint(-1, 9, (600, 2), generator=torch.Generator().manual_seed(1)).to(kernel_device())
    with OperatorWatch() as watch:
        first, second = (group_tokens(ids_TK, 8, num_ranks=2, implementation=group_pairs) for _ in range(2))
    assert watch.synchronising == []
    assert not [name for name in watch.calls if "sort" in name or "scatter" in name]
    for name in FIELDS:
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_experts", [8, 256, 4096])
def test_gpu_real_sizes_equal_the_torch_way_without_a_synchronisation(group_pairs, num_experts):
    ids_TK = torch.randint(-1, num_experts + 1, (32768, 8), device="cuda")
    group_tokens(ids_TK, num_experts, num_ranks=8, implementation=group_pairs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = group_tokens(ids_TK, num_experts, num_ranks=8, implementation=group_pairs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = group_tokens(ids_TK, num_experts, num_ranks=8, implementation="torch")
    for name in FIELDS:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
