import pytest
import torch

from megatron_glue.backends.attention_masks import CausalBand, build_band
from tests.support.operator_watch import OperatorWatch

CPU = torch.device("cpu")
SHAPES = [(5, 5, 0, 0), (5, 5, 0, 2), (3, 7, 4, 0), (3, 7, 4, 3), (4, 2, 1, 2), (1, 1, 0, 1), (0, 0, 0, 0)]


@pytest.mark.parametrize(("num_queries", "num_keys", "distance", "window"), SHAPES)
def test_a_query_sees_keys_by_distance_alone(num_queries, num_keys, distance, window):
    seen = [
        [0 <= distance + query - key < (window or num_queries + num_keys + distance + 1) for key in range(num_keys)]
        for query in range(num_queries)
    ]
    visible = torch.tensor(seen, dtype=torch.bool).view(num_queries, num_keys)
    with OperatorWatch() as watch:
        mask = build_band(CausalBand(num_queries, num_keys, distance, window, torch.bool, CPU))
        bias = build_band(CausalBand(num_queries, num_keys, distance, window, torch.float32, CPU))
    assert watch.synchronising == []
    assert torch.equal(mask, visible)
    assert bias.dtype == torch.float32
    assert torch.equal(bias, torch.zeros(visible.shape).masked_fill(~visible, float("-inf")))


def test_only_square_bands_that_start_together_are_corners_of_larger_ones():
    assert CausalBand(5, 5, 0, 2, torch.bool, CPU).is_corner
    assert not CausalBand(5, 6, 0, 2, torch.bool, CPU).is_corner
    assert not CausalBand(5, 5, 1, 2, torch.bool, CPU).is_corner
    large = build_band(CausalBand(9, 9, 0, 3, torch.float32, CPU))
    assert torch.equal(large[:5, :5], build_band(CausalBand(5, 5, 0, 3, torch.float32, CPU)))
