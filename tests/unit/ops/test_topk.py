import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_glue.ops.topk import topk_lowest_index


def oracle(rows: list[list[float]], k: int) -> list[list[int]]:
    return [sorted(range(len(row)), key=lambda column: (-row[column], column))[:k] for row in rows]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_equals_the_sorted_oracle(data):
    num_columns = data.draw(st.integers(1, 9))
    k = data.draw(st.integers(1, num_columns))
    # Few different values, so that most rows have ties.
    value = st.sampled_from([-float("inf"), -2.5, -1e-40, -0.0, 0.0, 1e-40, 0.5, 3.0, float("inf")])
    rows = data.draw(st.lists(st.lists(value, min_size=num_columns, max_size=num_columns), max_size=6))
    scores = torch.tensor(rows, dtype=torch.float32).view(len(rows), num_columns)
    values, ids = topk_lowest_index(scores, k)
    assert ids.dtype == torch.int64
    assert ids.tolist() == oracle(rows, k)
    assert torch.equal(values, scores.gather(1, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_columns", [4, 64, 300])
def test_f72_all_equal_scores_take_the_first_columns(dtype, num_columns):
    _, ids = topk_lowest_index(torch.zeros(5, num_columns, dtype=dtype), 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 5


def test_values_carry_gradients_to_the_chosen_scores():
    scores = torch.tensor([[0.1, 0.7, 0.7, 0.2]], dtype=torch.float64, requires_grad=True)
    values, ids = topk_lowest_index(scores, 2)
    (values * torch.tensor([3.0, 5.0], dtype=torch.float64)).sum().backward()
    assert ids.tolist() == [[1, 2]]
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0.0, 3.0, 5.0, 0.0]]


def test_nan_has_a_defined_place():
    _, ids = topk_lowest_index(torch.tensor([[0.0, float("nan"), float("inf")]]), 3)
    assert ids.tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("k", [0, 5])
def test_wrong_k_is_refused(k):
    with pytest.raises(ValueError, match=f"k={k}"):
        topk_lowest_index(torch.zeros(2, 4), k)
