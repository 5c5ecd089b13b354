from dataclasses import replace

import pytest
import torch

from megatron_glue.backends.router import RoutingRule
from megatron_glue.moe.router import Router, RouterConfig
from megatron_glue.ops.grouping import count_ids
from megatron_glue.ops.topk import topk_lowest_index
from tests.support.tolerances import assert_close
from tests.support.triton_kernels import far_rows, kernel_device

RULE = RoutingRule(2, "softmax", True, 1.0)


@pytest.fixture(scope="module")
def route():
    kernel_device()
    from megatron_glue.backends.triton.router import route

    return route


def routers(num_experts, rule, kernel, *, has_bias=False, hidden_size=8):
    """The same router with operators of torch and with the kernel, on the kernel's device."""
    config = RouterConfig(
        num_experts, rule.top_k, rule.score_function, rule.normalise_weights, rule.weight_scale, has_bias
    )
    generator = torch.Generator().manual_seed(num_experts)
    pair = Router(hidden_size, config), Router(hidden_size, config, kernel)
    torch.nn.init.normal_(pair[0].weight, generator=generator)
    if pair[0].expert_bias_E is not None:
        pair[0].expert_bias_E.normal_(generator=generator)
    pair[1].load_state_dict(pair[0].state_dict())
    return [router.to(kernel_device()) for router in pair]


def values_and_gradients(router, x, ids, losses):
    """Everything that a layer takes from a router, and the gradients of its input and weight."""
    routing = router(x, ids)
    values = {
        "weights": routing.weights_TK,
        "probs": routing.probs_TE,
        "prob_sums": routing.prob_sums_E,
        "log_sum_exp": routing.log_sum_exp_T,
    }
    total = torch.zeros((), device=x.device)
    for name in losses:
        generator = torch.Generator().manual_seed(len(name))
        total = total + (values[name] * torch.randn(values[name].shape, generator=generator).to(x.device)).sum()
    grads = torch.autograd.grad(total, (x, router.weight))
    return routing, values | {"grad of x": grads[0], "grad of weight": grads[1]}


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "rule", "has_bias", "is_given"),
    [
        (0, 4, RULE, False, False),
        (70, 6, replace(RULE, weight_scale=2.5), True, False),
        (33, 5, replace(RULE, top_k=5, score_function="sigmoid"), True, False),
        (40, 64, replace(RULE, top_k=3, score_function="sigmoid", normalise_weights=False), False, True),
        (9, 300, replace(RULE, top_k=1, normalise_weights=False), False, False),
        (5, 1, replace(RULE, top_k=1), False, False),
        (12, 8, replace(RULE, top_k=3), False, True),
    ],
)
def test_equals_the_oracle(route, num_tokens, num_experts, rule, has_bias, is_given):
    expected_router, router = routers(num_experts, rule, route, has_bias=has_bias)
    x = torch.randn(num_tokens, 8, generator=torch.Generator().manual_seed(7)).to(kernel_device()).requires_grad_()
    ids = torch.rand(num_tokens, num_experts).topk(rule.top_k).indices.to(x.device) if is_given else None
    losses = ("weights", "probs", "prob_sums", "log_sum_exp")
    expected, wanted = values_and_gradients(expected_router, x, ids, losses)
    routing, actual = values_and_gradients(router, x, ids, losses)
    assert torch.equal(routing.expert_ids_TK, expected.expert_ids_TK)
    assert torch.equal(routing.counts_E, count_ids(expected.expert_ids_TK, num_experts))
    for name, value in wanted.items():
        assert_close(actual[name], value, what=name)


@pytest.mark.parametrize("loss", ["weights", "probs", "prob_sums", "log_sum_exp"])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_each_gradient_alone(route, loss, score_function):
    expected_router, router = routers(6, replace(RULE, score_function=score_function), route)
    x = torch.randn(7, 8, generator=torch.Generator().manual_seed(1)).to(kernel_device()).requires_grad_()
    _, wanted = values_and_gradients(expected_router, x, None, [loss])
    _, actual = values_and_gradients(router, x, None, [loss])
    assert_close(actual["grad of x"], wanted["grad of x"])


def test_f72_equal_scores_choose_the_lower_expert(route):
    logits = torch.zeros(3, 6, device=kernel_device())
    logits[1] = torch.tensor([0.0, 1.0, -0.0, 1.0, 0.0, 1.0])
    logits[2] = torch.tensor([float("-inf"), 0.0, 0.0, float("-inf"), 0.0, float("-inf")])
    ids = route(logits, replace(RULE, top_k=4), None, None).expert_ids_TK
    assert ids.tolist() == [[0, 1, 2, 3], [1, 3, 5, 0], [1, 2, 4, 0]]


@pytest.mark.parametrize("special", [0.0, -0.0, float("inf"), float("-inf"), float("nan"), -float("nan")])
def test_choice_of_any_scores_is_that_of_the_oracle(route, special):
    """The bias makes scores of any sign and kind; sigmoid gives each expert the same 0.5 to add it to."""
    bias = torch.tensor([special, -0.7, 3.0, -0.5, 1e-3, -0.7, -2.0, special], device=kernel_device())
    logits = torch.zeros(2, 8, device=kernel_device())
    ids = route(logits, RoutingRule(8, "sigmoid", False, 1.0), bias, None).expert_ids_TK
    assert torch.equal(ids, topk_lowest_index(torch.sigmoid(logits) + bias, 8)[1])


def test_repeated_runs_are_equal_over_many_programs(route, monkeypatch):
    from megatron_glue.backends.triton import router

    monkeypatch.setattr(router, "_MAX_TILE_ELEMENTS", 8)
    monkeypatch.setattr(router, "_PARTS_PER_STEP", 4)
    logits = torch.randn(75, 4, generator=torch.Generator().manual_seed(3)).to(kernel_device())
    first, second = (route(logits, RULE, None, None) for _ in range(2))
    assert torch.equal(first.statistics.prob_sums_E, second.statistics.prob_sums_E)
    assert_close(first.statistics.prob_sums_E, logits.softmax(-1).sum(0))
    assert torch.equal(first.statistics.counts_E, count_ids(first.expert_ids_TK, 4))


def test_f59_logits_are_found_past_two_to_the_31_elements(route):
    near = torch.randn(3, 4, generator=torch.Generator().manual_seed(5)).to(kernel_device()).requires_grad_()
    far = far_rows(near.detach()).requires_grad_()
    wanted, actual = (route(logits, RULE, None, None) for logits in (near, far))
    assert torch.equal(actual.expert_ids_TK, wanted.expert_ids_TK)
    grads = [torch.autograd.grad(r.weights_TK[:, 0].sum(), logits)[0] for r, logits in ((wanted, near), (actual, far))]
    assert torch.equal(grads[1], grads[0])
    assert grads[0].abs().sum(1).all()


def test_more_choices_than_experts_are_refused(route):
    with pytest.raises(ValueError, match="top_k=5"):
        route(torch.zeros(2, 4), replace(RULE, top_k=5), None, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_experts", [8, 256, 4096])
def test_gpu_real_sizes(route, num_experts):
    """Scores may differ in the last bit from torch's: the choice is checked against the kernel's own probabilities."""
    logits = torch.randn(8192, num_experts, device="cuda", requires_grad=True)
    routed = route(logits, replace(RULE, top_k=8, normalise_weights=False), None, None)
    assert torch.equal(routed.expert_ids_TK, topk_lowest_index(routed.probs_TE, 8)[1])
    assert_close(routed.probs_TE, logits.softmax(-1))
    assert torch.equal(routed.statistics.counts_E, count_ids(routed.expert_ids_TK, num_experts))
    probe = torch.randn_like(routed.weights_TK)
    expected = logits.softmax(-1).gather(1, routed.expert_ids_TK)
    grads = [torch.autograd.grad((weights * probe).sum(), logits)[0] for weights in (routed.weights_TK, expected)]
    assert_close(*grads)
