import pytest
import torch

from megatron_glue.ops.dropout import derive_seed, keep_mask, position_keys, seed_of_name, seeded_dropout


def test_seeds_are_stable_and_distinct():
    seeds = {derive_seed(a, b) for a in range(30) for b in range(30)}
    assert len(seeds) == 900
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2) != derive_seed(2, 1)
    assert derive_seed(0) != derive_seed(0, 0)
    assert derive_seed(-1, 2**70) == derive_seed(-1, 2**70)
    # Every first loss depends on these values: they are the same in every process, and must never change.
    assert derive_seed(1234, 5) == 4189393990726187091
    assert seed_of_name("blocks.0.attention.qkv_weight") == 1440746319826737760


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_drops_the_right_share_without_pattern(p):
    keep = (seeded_dropout(torch.ones(512, 256), p, 99) > 0).double()
    sigma = (p * (1 - p)) ** 0.5
    assert abs(keep.mean().item() - (1 - p)) < 5 * sigma / keep.numel() ** 0.5
    assert (keep.mean(0) - (1 - p)).abs().max() < 6 * sigma / 512**0.5
    assert (keep.mean(1) - (1 - p)).abs().max() < 6 * sigma / 256**0.5
    centred = (keep - (1 - p)) / sigma
    for shifted in (centred.roll(1, 0), centred.roll(1, 1), centred.roll((1, 1), (0, 1))):
        assert abs((centred * shifted).mean().item()) < 5 / keep.numel() ** 0.5


def test_scales_what_is_kept_and_gradients_alike():
    x = torch.randn(64, 32, requires_grad=True)
    y = seeded_dropout(x, 0.25, 5)
    y.sum().backward()
    mask = y != 0
    assert torch.allclose(y[mask], x[mask] / 0.75)
    assert x.grad is not None
    assert torch.equal(x.grad != 0, mask)
    assert torch.allclose(x.grad[mask], torch.tensor(1 / 0.75))


def test_a_slice_has_the_mask_of_the_whole():
    x = torch.randn(40, 24)
    whole = seeded_dropout(x, 0.5, 5)
    part = seeded_dropout(x[16:30, 8:20], 0.5, 5, row_offset=16, column_offset=8)
    assert torch.equal(part, whole[16:30, 8:20])


def test_rows_in_any_order_have_the_mask_of_their_place_in_the_whole():
    x, rows = torch.randn(40, 24), torch.randperm(40)[:17]
    whole = seeded_dropout(x, 0.5, 5)
    assert torch.equal(seeded_dropout(x[rows], 0.5, 5, row_ids_T=rows), whole[rows])
    part = seeded_dropout(x[rows, 8:20], 0.5, 5, row_ids_T=rows, column_offset=8)
    assert torch.equal(part, whole[rows, 8:20])


def test_repeats_whatever_ran_before_and_leaves_global_generators_alone():
    x = torch.randn(8, 8)
    first = seeded_dropout(x, 0.5, 5)
    state = torch.get_rng_state()
    seeded_dropout(x, 0.5, 6)
    assert torch.equal(seeded_dropout(x, 0.5, 5), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(seeded_dropout(x, 0.5, 6), first)


def test_probability_zero_is_the_identity():
    x = torch.randn(3, 3)
    assert seeded_dropout(x, 0.0, 1) is x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_keeps_the_dtype_and_empty_rows(dtype):
    assert seeded_dropout(torch.ones(4, 4, dtype=dtype), 0.5, 1).dtype == dtype
    assert seeded_dropout(torch.ones(0, 4, dtype=dtype), 0.5, 1).shape == (0, 4)


def test_masks_of_seeds_that_differ_in_high_bits_differ():
    positions = torch.arange(1000)
    low, high = position_keys(positions, 7), position_keys(positions, 7 + (1 << 40))
    assert (low == high).sum() < 3
    assert keep_mask(low, high, 0.5).double().mean().sub(0.5).abs() < 0.1
