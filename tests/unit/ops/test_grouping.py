import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_glue.ops.grouping import group_tokens, reorder_experts, replicate_groups
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.types import TokenGroups
from tests.support.operator_watch import OperatorWatch

WAYS = [
    {"implementation": "numpy"},
    {"implementation": "torch"},
    {"implementation": "auto"},
    {"method": "loop"},
]
DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def expected_groups(ids: list[int], num_experts: int, num_ranks: int) -> dict[str, list[int]]:
    """Plain-Python oracle: sort pairs by (expert or E, pair)."""
    keys = [expert if 0 <= expert < num_experts else num_experts for expert in ids]
    order = sorted(range(len(ids)), key=lambda pair: (keys[pair], pair))
    inverse = [0] * len(ids)
    for row, pair in enumerate(order):
        inverse[pair] = row
    counts = [keys.count(expert) for expert in range(num_experts)]
    per_rank = num_experts // num_ranks
    return {
        "order_N": order,
        "inverse_N": inverse,
        "counts_E": counts,
        "offsets_E": [sum(counts[: expert + 1]) for expert in range(num_experts)],
        "rank_splits_P": [sum(counts[rank * per_rank : (rank + 1) * per_rank]) for rank in range(num_ranks)],
    }


def assert_groups(groups: TokenGroups, expected: dict[str, list[int]]) -> None:
    for name, values in expected.items():
        tensor = getattr(groups, name)
        assert tensor.dtype == torch.int64, name
        assert tensor.tolist() == values, name


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[list[int]], int, int, int, torch.dtype]:
    dtype = draw(st.sampled_from(DTYPES))
    num_ranks = draw(st.sampled_from([1, 2, 4]))
    num_experts = num_ranks * draw(st.integers(1, 12))
    top_k = draw(st.integers(1, 4))
    lowest = 0 if dtype == torch.uint8 else -2
    row = st.lists(st.integers(lowest, num_experts + 1), min_size=top_k, max_size=top_k)
    return draw(st.lists(row, max_size=30)), top_k, num_experts, num_ranks, dtype


@given(routings())
@settings(max_examples=150, deadline=None)
def test_every_way_equals_the_oracle(routing):
    ids, top_k, num_experts, num_ranks, dtype = routing
    ids_TK = torch.tensor(ids, dtype=dtype).view(len(ids), top_k)
    expected = expected_groups([expert for row in ids for expert in row], num_experts, num_ranks)
    for way in WAYS:
        groups = group_tokens(ids_TK, num_experts, num_ranks=num_ranks, **way)
        assert_groups(groups, expected)
        assert groups.top_k == top_k


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("num_experts", [255, 256, 32767, 32768, 65535, 65536, 70000])
def test_key_widths(way, num_experts):
    """Each side of every width at which keys change their dtype, the sentinel key E included."""
    generator = torch.Generator().manual_seed(num_experts)
    ids_TK = torch.randint(-1, num_experts + 1, (500, 2), generator=generator)
    ids_TK[0] = torch.tensor([num_experts - 1, num_experts])
    groups = group_tokens(ids_TK, num_experts, num_ranks=1, **way)
    keys_N = torch.where((ids_TK < 0) | (ids_TK >= num_experts), num_experts, ids_TK).reshape(-1)
    assert torch.equal(groups.order_N, torch.sort(keys_N, stable=True).indices)
    assert torch.equal(groups.inverse_N[groups.order_N], torch.arange(1000))
    assert torch.equal(groups.counts_E, torch.bincount(keys_N, minlength=num_experts + 1)[:num_experts])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("ids", "top_k", "num_experts"),
    [([], 2, 4), ([0, 0, 0, 0], 2, 1), ([3] * 8, 2, 4), ([-1] * 4, 1, 3), ([4, -1, 4, -1], 2, 4), ([5], 1, 8)],
    ids=["no tokens", "one expert", "all to one", "all dropped", "both sentinels", "mostly empty"],
)
def test_corner_cases(way, ids, top_k, num_experts):
    ids_TK = torch.tensor(ids, dtype=torch.int32).view(-1, top_k)
    assert_groups(group_tokens(ids_TK, num_experts, **way), expected_groups(ids, num_experts, 1))


def test_one_dim_means_one_choice_and_any_stride_is_read():
    ids_TK = torch.tensor([[2, 0], [1, 2], [0, 1]])
    groups = group_tokens(ids_TK[:, 0], 3)
    assert groups.top_k == 1
    assert_groups(groups, expected_groups([2, 1, 0], 3, 1))


@pytest.mark.parametrize("way", WAYS)
def test_input_is_left_alone(way):
    ids_TK = torch.tensor([[2, -1], [9, 0]])
    before = ids_TK.clone()
    group_tokens(ids_TK, 3, **way)
    assert torch.equal(ids_TK, before)


def test_f59_offsets_do_not_wrap_in_32_bits():
    """38,000 tokens x 8 choices x hidden 7168 passes 2^31: an offset times a width must stay exact."""
    groups = group_tokens(torch.zeros(38000, 8, dtype=torch.int16), 2)
    last_element = groups.offsets_E[0] * 7168
    assert last_element.item() == 38000 * 8 * 7168 > 2**31


def test_f80_torch_way_never_waits_for_the_device():
    """The NumPy way is the CPU's own and is exempt: there is no device to wait for."""
    ids_TK = torch.randint(-1, 9, (64, 2))
    with OperatorWatch() as watch:
        group_tokens(ids_TK, 8, num_ranks=4, implementation="torch")
    assert watch.calls
    assert watch.synchronising == []
    with OperatorWatch() as watch:
        group_tokens(ids_TK, 8, method="loop")
    assert len(watch.synchronising) == 9


def test_loop_reads_are_counted():
    reader = HostReader()
    group_tokens(torch.tensor([[0, 1]]), 6, method="loop", host_reader=reader)
    assert reader.count == 7
    group_tokens(torch.tensor([[0, 1]]), 6, host_reader=reader)
    assert reader.count == 7


@pytest.mark.parametrize(
    ("ids", "num_experts", "num_ranks", "named"),
    [
        (torch.zeros(2, 2), 4, 1, "dtype"),
        (torch.zeros(2, 2, dtype=torch.bool), 4, 1, "dtype"),
        (torch.zeros(2, 2, 2, dtype=torch.int64), 4, 1, "shape"),
        (torch.zeros(2, 0, dtype=torch.int64), 4, 1, "shape"),
        (torch.zeros(2, 2, dtype=torch.int64), 0, 1, "num_experts"),
        (torch.zeros(2, 2, dtype=torch.int64), 4, 3, "num_ranks"),
    ],
)
def test_wrong_input_is_refused(ids, num_experts, num_ranks, named):
    with pytest.raises(ValueError, match=named):
        group_tokens(ids, num_experts, num_ranks=num_ranks)


def test_result_shares_no_memory_with_the_input():
    ids = np.array([[1], [0]])
    groups = group_tokens(torch.from_numpy(ids), 2)
    ids[:] = 0
    assert groups.order_N.tolist() == [1, 0]


@given(
    st.sampled_from([(1, 2), (2, 1), (2, 2), (2, 3), (4, 2)]),
    st.integers(1, 3),
    st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2), max_size=20),
)
@settings(max_examples=100, deadline=None)
def test_replicas_equal_a_grouping_by_rank_replica_and_expert(sizes, per_rank, ids):
    """Oracle: pair (t, k, q) goes to expert e of rank (p, q); grouping these "experts" from scratch gives the same."""
    num_ranks, num_replicas = sizes
    num_experts = num_ranks * per_rank
    ids_TK = torch.tensor(ids, dtype=torch.int64).view(-1, 2) % num_experts
    groups = group_tokens(ids_TK, num_experts, num_ranks=num_ranks)
    actual = replicate_groups(groups, num_replicas)
    rank_TK, expert_TK = ids_TK // per_rank, ids_TK % per_rank
    block_TKQ = rank_TK[..., None] * num_replicas + torch.arange(num_replicas)
    expected = group_tokens(
        (block_TKQ * per_rank + expert_TK[..., None]).flatten(1),
        num_experts * num_replicas,
        num_ranks=num_ranks * num_replicas,
    )
    for name in ("order_N", "inverse_N", "counts_E", "offsets_E", "rank_splits_P", "top_k"):
        value, wanted = getattr(actual.groups, name), getattr(expected, name)
        assert torch.equal(value, wanted) if isinstance(wanted, torch.Tensor) else value == wanted, name
    rows = torch.arange(groups.num_pairs)
    assert torch.equal(actual.source_S[actual.rows_NQ], rows[:, None].expand(-1, num_replicas))


def test_f80_replicating_neither_sorts_nor_waits():
    groups = group_tokens(torch.tensor([[0, 3], [2, 1], [3, 0]]), 4, num_ranks=2)
    with OperatorWatch() as watch:
        replicate_groups(groups, 2)
    assert watch.synchronising == []
    assert not [name for name in watch.calls if "sort" in name]


@given(st.lists(st.integers(0, 5), max_size=40).map(lambda ids: ids[: len(ids) // 2 * 2]), st.permutations(range(6)))
@settings(max_examples=60, deadline=None)
def test_reordering_equals_a_grouping_of_renamed_experts(ids, experts):
    """Expert experts[i] comes at place i."""
    ids_TK = torch.tensor(ids, dtype=torch.int64).view(-1, 2)
    groups = group_tokens(ids_TK, 6, num_ranks=3)
    actual, rows_N = reorder_experts(groups, torch.tensor(experts))
    place = torch.tensor([experts.index(expert) for expert in range(6)])
    expected = group_tokens(place[ids_TK], 6)
    for name in ("order_N", "inverse_N", "counts_E", "offsets_E"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert torch.equal(groups.order_N[rows_N], actual.order_N)
    assert torch.equal(actual.rank_splits_P, groups.rank_splits_P)


def test_f80_reordering_neither_sorts_nor_waits():
    groups = group_tokens(torch.tensor([[0, 1], [3, 2]]), 4)
    with OperatorWatch() as watch:
        reorder_experts(groups, torch.tensor([1, 3, 0, 2]))
    assert watch.synchronising == []
    assert not [name for name in watch.calls if "sort" in name]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_gpu_one_pass_equals_the_cpu_without_a_synchronisation(num_ranks):
    ids_TK = torch.randint(-1, 65, (4096, 4), generator=torch.Generator().manual_seed(2))
    expected = group_tokens(ids_TK, 64, num_ranks=num_ranks, implementation="numpy")
    on_gpu = ids_TK.cuda()
    group_tokens(on_gpu, 64, num_ranks=num_ranks, implementation="torch")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        groups = group_tokens(on_gpu, 64, num_ranks=num_ranks, implementation="torch")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name in ("order_N", "inverse_N", "counts_E", "offsets_E", "rank_splits_P"):
        assert torch.equal(getattr(groups, name).cpu(), getattr(expected, name)), name
