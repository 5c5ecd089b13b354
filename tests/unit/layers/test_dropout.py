import torch

from megatron_glue.layers.dropout import SeededDropout, site_seed
from megatron_glue.types import ForwardContext
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
