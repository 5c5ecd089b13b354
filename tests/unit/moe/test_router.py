import pytest
import torch

from megatron_glue.moe.router import Router, RouterConfig, update_expert_biases
from tests.support.moe_cases import random_rows
from tests.support.tolerances import assert_close


def build(hidden_size: int = 8, **changes) -> Router:
    settings = {
        "num_experts": 6,
        "top_k": 2,
        "score_function": "softmax",
        "normalise_weights": True,
        "weight_scale": 1.0,
        "has_expert_bias": False,
    }
    router = Router(hidden_size, RouterConfig(**(settings | changes)))
    with torch.no_grad():
        router.weight.copy_(random_rows(settings["num_experts"], hidden_size, seed=1))
    return router


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_weights_equal_the_formula(score_function, normalise, scale):
    router = build(score_function=score_function, normalise_weights=normalise, weight_scale=scale)
    x = random_rows(20, 8)
    routing = router(x)
    logits = x.double() @ router.weight.double().t()
    scores = logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()
    expected, ids = scores.topk(2)
    if normalise:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(routing.expert_ids_TK, ids)
    assert_close(routing.weights_TK, (expected * scale).float())
    assert_close(routing.probs_TE.sum(-1), torch.ones(20))


def test_logits_are_fp32_products_of_fp32_weights_under_bf16_activations():
    router = build(hidden_size=64)
    x = random_rows(50, 64).detach().bfloat16()
    routing = router(x)
    assert routing.logits_TE.dtype == routing.weights_TK.dtype == torch.float32
    assert_close(routing.logits_TE, (x.double() @ router.weight.double().t()).float(), tolerance=1e-6)


def test_f72_equal_logits_choose_the_first_experts():
    router = build()
    torch.nn.init.zeros_(router.weight)
    assert router(random_rows(5, 8)).expert_ids_TK.tolist() == [[0, 1]] * 5


def test_a_given_choice_is_kept():
    router = build()
    x = random_rows(5, 8)
    ids = torch.tensor([[5, 0]] * 5)
    routing = router(x, ids)
    assert routing.expert_ids_TK is ids
    assert_close(routing.weights_TK.sum(-1), torch.ones(5))


def test_bias_enters_the_choice_and_nothing_else():
    router = build(has_expert_bias=True, normalise_weights=False)
    x = random_rows(30, 8)
    assert router.expert_bias_E is not None
    router.expert_bias_E[3] = 100.0
    routing = router(x)
    assert (routing.expert_ids_TK[:, 0] == 3).all()
    assert_close(routing.weights_TK, routing.probs_TE.gather(1, routing.expert_ids_TK))


@pytest.mark.parametrize("cast", [lambda r: r.bfloat16(), lambda r: r.to(torch.bfloat16), lambda r: r.half()])
def test_f69_bias_stays_fp32_with_all_its_digits(cast):
    router = build(has_expert_bias=True)
    counts = torch.tensor([10, 0, 0, 0, 0, 0])
    update_expert_biases([router], [counts], 1e-3)
    assert router.expert_bias_E is not None
    before = router.expert_bias_E.clone()
    cast(router)
    assert router.expert_bias_E.dtype == torch.float32
    assert torch.equal(router.expert_bias_E, before)
    for _ in range(1000):
        update_expert_biases([router], [counts], 1e-3)
    gap = router.expert_bias_E[1] - router.expert_bias_E[0]
    assert gap.item() == pytest.approx(1001 * 2e-3, rel=1e-4)


@pytest.mark.parametrize("assign", [False, True])
def test_f69_bias_stays_fp32_through_save_and_load(assign):
    router = build(has_expert_bias=True)
    update_expert_biases([router], [torch.tensor([3, 1, 1, 1, 0, 0])], 0.1)
    saved = {name: tensor.clone() for name, tensor in router.state_dict().items()}
    assert saved["expert_bias_E"].dtype == torch.float32
    other = build(has_expert_bias=True).bfloat16()
    other.load_state_dict(saved, assign=assign)
    assert other.expert_bias_E is not None
    assert torch.equal(other.expert_bias_E, saved["expert_bias_E"])
    half = {name: tensor.bfloat16() for name, tensor in saved.items()}
    other.load_state_dict(half, assign=assign)
    assert other.expert_bias_E.dtype == torch.float32


def test_bias_step_is_a_mean_centred_sign():
    router = build(has_expert_bias=True)
    counts = torch.tensor([9, 3, 3, 3, 0, 0])
    update_expert_biases([router], [counts], 0.1)
    expected = 0.1 * (torch.tensor([-1.0, 0.0, 0.0, 0.0, 1.0, 1.0]) - 1 / 6)
    assert router.expert_bias_E is not None
    assert_close(router.expert_bias_E, expected)
    assert router.expert_bias_E.mean().item() == pytest.approx(0.0, abs=1e-8)


def test_bias_balances_a_skewed_router():
    router = build(has_expert_bias=True)
    x = random_rows(256, 8).detach()
    x[:, 0] += 2.0
    before = torch.bincount(router(x).expert_ids_TK.flatten(), minlength=6)
    for _ in range(800):
        update_expert_biases([router], [torch.bincount(router(x).expert_ids_TK.flatten(), minlength=6)], 1e-3)
    after = torch.bincount(router(x).expert_ids_TK.flatten(), minlength=6)
    mean = 256 * 2 / 6
    assert (before - mean).abs().max() > 0.5 * mean
    assert (after - mean).abs().max() < 0.25 * mean


def test_f68_bias_is_the_same_for_one_or_four_micro_batches():
    one, four = build(has_expert_bias=True), build(has_expert_bias=True)
    x = random_rows(64, 8).detach()

    def counts(router, rows):
        return torch.bincount(router(rows).expert_ids_TK.flatten(), minlength=6)

    for _ in range(3):
        update_expert_biases([one], [counts(one, x)], 0.05)
        update_expert_biases([four], [torch.stack([counts(four, part) for part in x.chunk(4)]).sum(0)], 0.05)
    assert one.expert_bias_E is not None
    assert four.expert_bias_E is not None
    assert torch.equal(one.expert_bias_E, four.expert_bias_E)


def test_wrong_updates_are_refused():
    with pytest.raises(ValueError, match="1 entries for 2 routers"):
        update_expert_biases([build(), build()], [torch.zeros(6, dtype=torch.int64)], 0.1)
    with pytest.raises(ValueError, match="no expert bias"):
        update_expert_biases([build()], [torch.zeros(6, dtype=torch.int64)], 0.1)


@pytest.mark.parametrize("is_update", [True, False])
def test_f113_a_skipped_update_leaves_the_biases(is_update):
    router = build(has_expert_bias=True)
    before = router.expert_bias_E.clone()
    update_expert_biases([router], [torch.tensor([9, 0, 0, 0, 0, 0])], 0.1, torch.tensor(is_update))
    assert torch.equal(router.expert_bias_E, before) is not is_update
