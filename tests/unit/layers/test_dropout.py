import pytest
import torch

from megatron_glue.layers.dropout import SeededDropout, site_seed
from megatron_glue.types import ForwardContext, PackedSequence
from tests.support.layer_cases import pack


def test_every_coordinate_of_the_seed_counts():
    sequence = pack("one")
    seeds = {
        site_seed(ForwardContext(sequence, seed=seed, step=step, micro_batch=micro_batch), layer, site)
        for seed in (0, 1)
        for step in (0, 1)
        for micro_batch in (0, 1)
        for layer in (-1, 0, 1)
        for site in ("a", "b")
    }
    assert len(seeds) == 48


def test_off_in_evaluation_and_at_zero():
    x, context = torch.randn(37, 8), ForwardContext(pack("one"))
    assert SeededDropout(0.0, 0, "a")(x, context) is x
    dropout = SeededDropout(0.5, 0, "a")
    assert not torch.equal(dropout(x, context), x)
    assert dropout.eval()(x, context) is x


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_every_layout_drops_the_same_elements_of_a_token(cp_size, tp_size):
    sequence = PackedSequence.from_lengths([13, 5, 20, 3], 23)
    dropout, x = SeededDropout(0.5, 3, "a"), torch.randn(64, 8)
    whole = dropout(x, ForwardContext(sequence, seed=1, step=2, micro_batch=3))
    num_seen = 0
    for cp_rank in range(cp_size):
        part = sequence if cp_size == 1 else sequence.shard(cp_rank, cp_size, 8)
        tokens = torch.arange(64) if part.token_ids_T is None else part.token_ids_T
        share = part.num_tokens // tp_size
        for tp_rank in range(tp_size):
            rows = slice(tp_rank * share, (tp_rank + 1) * share)
            context = ForwardContext(part, seed=1, step=2, micro_batch=3, residual_rows=rows if tp_size > 1 else None)
            assert torch.equal(dropout(x[tokens[rows]], context), whole[tokens[rows]])
            num_seen += share
    assert num_seen == 64
