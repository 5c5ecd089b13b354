"""The update against torch's own AdamW, the groups, and the skip of updates that are not finite."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_glue.config.sections import OptimizerConfig
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.precision import local
from megatron_glue.training.lr_schedule import LearningRateSchedule
from megatron_glue.training.optimizer import GuardedAdamW, build_optimizer, is_decayed

CPU = torch.device("cpu")
IMPLEMENTATIONS = ["fused", "foreach"]
FINITE_NORM = torch.tensor(1.0)


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.expert_bias = nn.Parameter(torch.randn(2, 4, generator=generator))
        for param in self.parameters():
            param.data.normal_(generator=generator)


def build(model: nn.Module, implementation: str, **options) -> GuardedAdamW:
    return build_optimizer(model.named_parameters(), OptimizerConfig(), implementation, CPU, **options)


def set_gradients(model: nn.Module, seed: int, *, poison: bool = False) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    if poison:
        next(iter(model.parameters())).grad[0, 0] = float("nan")


def snapshot(model: nn.Module, optimizer: GuardedAdamW) -> dict[str, torch.Tensor]:
    tensors = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, _, state in optimizer.named_state():
        tensors |= {f"{name}/{key}": value.clone() for key, value in state.items()}
    return tensors


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_update_is_decoupled_weight_decay_adam(implementation: str) -> None:
    model, config = TinyModel(), OptimizerConfig()
    optimizer = build(model, implementation)
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
    for step, rate in enumerate([0.1, 0.01, 0.05], start=1):
        set_gradients(model, step)
        for name, param in model.named_parameters():
            first, second = moments[name]
            first.lerp_(param.grad, 1 - config.adam_beta1)
            second.lerp_(param.grad.square(), 1 - config.adam_beta2)
            decay = config.weight_decay if name == "embedding.weight" else 0.0
            weights[name].mul_(1 - rate * decay)
            denominator = (second / (1 - config.adam_beta2**step)).sqrt() + config.adam_eps
            weights[name].sub_(rate * first / (1 - config.adam_beta1**step) / denominator)
        optimizer.step(rate, FINITE_NORM)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach(), weights[name], rtol=1e-5, atol=1e-6)


def test_matrices_and_embeddings_decay_norms_and_biases_do_not() -> None:
    model = TinyModel()
    assert {name for name, p in model.named_parameters() if is_decayed(name, p)} == {"embedding.weight"}
    groups = build(model, "fused").torch_optimizer.param_groups
    assert {group["weight_decay"]: len(group["params"]) for group in groups} == {0.1: 1, 0.0: 3}


def test_frozen_parameters_are_left_out() -> None:
    model = TinyModel()
    model.norm.requires_grad_(False)
    assert {name for name, _, _ in build(model, "fused").named_state()} == {"embedding.weight", "expert_bias"}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_f113_nonfinite_norm_skips_the_whole_update(implementation: str, norm: float) -> None:
    model = TinyModel()
    optimizer = build(model, implementation)
    set_gradients(model, 0)
    optimizer.step(0.1, FINITE_NORM)
    before = snapshot(model, optimizer)
    set_gradients(model, 1, poison=True)
    optimizer.step(0.1, torch.tensor(norm))
    after = snapshot(model, optimizer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert optimizer.num_skipped_updates == 1

    set_gradients(model, 2)
    optimizer.step(0.1, FINITE_NORM)
    assert optimizer.num_skipped_updates == 1, "a skipped update is counted once"
    final = snapshot(model, optimizer)
    assert all(torch.isfinite(value).all() for value in final.values())
    assert not torch.equal(final["embedding.weight"], after["embedding.weight"])
    assert final["embedding.weight/step"] == 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("norm", [1.0, float("nan")])
def test_a_step_with_rows_without_room_updates_nothing_and_is_no_skipped_update(
    implementation: str, norm: float
) -> None:
    model = TinyModel()
    optimizer = build(model, implementation)
    set_gradients(model, 0)
    optimizer.step(0.1, FINITE_NORM, torch.tensor(0))
    assert optimizer.num_overflowing == 0
    before = snapshot(model, optimizer)
    set_gradients(model, 1)
    optimizer.step(0.1, torch.tensor(norm), torch.tensor(7))
    assert optimizer.num_skipped_updates == 0, "whether the gradient is finite shows when the step is run again"
    assert optimizer.num_overflowing == 7
    after = snapshot(model, optimizer)
    assert all(torch.equal(before[key], after[key]) for key in before)
    optimizer.step(0.1, FINITE_NORM)
    assert optimizer.num_overflowing == 0, "it is of the last step"
    assert not torch.equal(snapshot(model, optimizer)["embedding.weight"], after["embedding.weight"])


def test_f113_schedule_stands_still_for_skipped_updates() -> None:
    model = TinyModel()
    optimizer = build(model, "fused")
    schedule = LearningRateSchedule(OptimizerConfig(lr=1.0, min_lr=0.0, lr_warmup_iters=10), 100)
    rates = []
    for iteration, norm in enumerate([1.0, float("nan"), 1.0]):
        rates.append(schedule.at(iteration - optimizer.num_skipped_updates))
        set_gradients(model, iteration)
        optimizer.step(rates[-1], torch.tensor(norm))
    assert rates == [0.1, 0.2, 0.2]


def test_only_the_foreach_variant_reads_the_flag_at_once() -> None:
    reads = {}
    for implementation in IMPLEMENTATIONS:
        model, reader = TinyModel(), HostReader()
        optimizer = build(model, implementation, host_reader=reader)
        for step in range(3):
            set_gradients(model, step)
            optimizer.step(0.1, FINITE_NORM)
        reads[implementation] = reader.count
    assert reads == {"fused": 0, "foreach": 3}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_f110_the_present_learning_rate_wins_in_every_group(implementation: str) -> None:
    model = TinyModel()
    optimizer = build(model, implementation, lr_multiplier_of=lambda name: 0.5 if name == "expert_bias" else 1.0)
    for rate in (0.1, 0.02):
        set_gradients(model, 0)
        optimizer.step(rate, FINITE_NORM)
        groups = optimizer.torch_optimizer.param_groups
        assert sorted(group["lr"] for group in groups) == [rate / 2, rate, rate]


def test_initial_state_equals_what_adamw_creates() -> None:
    for implementation in IMPLEMENTATIONS:
        model = TinyModel()
        ours = build(model, implementation)
        set_gradients(model, 0)
        theirs = torch.optim.AdamW(model.parameters(), **{implementation: True})
        theirs.step()
        for _, param, state in ours.named_state():
            created = theirs.state[param]
            assert {key: (value.shape, value.dtype, value.device) for key, value in state.items()} == {
                key: (value.shape, value.dtype, value.device) for key, value in created.items()
            }


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layers_see_the_new_weight_after_an_update(implementation: str) -> None:
    model = TinyModel()
    optimizer = build(model, implementation)
    before = local(model.embedding.weight, torch.bfloat16).detach().clone()
    set_gradients(model, 0)
    optimizer.step(0.5, FINITE_NORM)
    after = local(model.embedding.weight, torch.bfloat16)
    assert not torch.equal(before, after)
    assert torch.equal(after, model.embedding.weight.detach().bfloat16())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_is_what_was_chosen(implementation: str) -> None:
    optimizer = build(TinyModel(), implementation)
    assert optimizer.implementation == implementation
    assert optimizer.torch_optimizer.defaults[implementation] is True


def test_moments_are_made_when_they_are_asked_for_and_not_before() -> None:
    optimizer = build(nn.Linear(3, 2), "fused")
    assert not optimizer.torch_optimizer.state
    states = {name: state for name, _, state in optimizer.named_state()}
    assert states["weight"]["exp_avg"].shape == (2, 3)
    assert states["weight"] is next(state for name, _, state in optimizer.named_state() if name == "weight")


def test_another_update_can_take_the_place_of_torchs_own() -> None:
    model = nn.Linear(3, 2)
    optimizer = build(model, "foreach")
    calls: list[str] = []
    optimizer.run_update = lambda: calls.append("updated")
    before = model.weight.detach().clone()
    optimizer.step(0.1, torch.tensor(1.0))
    optimizer.step(0.1, torch.tensor(float("nan")))
    assert calls == ["updated"], "and is skipped like it"
    assert torch.equal(model.weight, before)
