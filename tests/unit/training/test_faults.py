"""Which losses are spikes, and when steps that are not finite end a run."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_glue.parallel.managed_block import canonical_name
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.faults import FaultWatch, TrainingFaultError, find_spikes
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.step import train_step
from tests.support.cases import small_config, write_corpus


def noisy_losses(count: int) -> list[float]:
    draw = random.Random(0)
    return [3.0 + draw.gauss(0, 0.05) for _ in range(count)]


def test_a_jump_is_a_spike_and_noise_is_none() -> None:
    losses = noisy_losses(300)
    assert find_spikes(losses, 0, 10.0) == []
    losses[150] = 5.0
    assert find_spikes(losses, 0, 10.0) == [150]
    assert find_spikes(losses, 151, 10.0) == [], "each is judged once"
    assert find_spikes(losses, 0, 0.0) == []


def test_falling_losses_and_few_of_them_are_no_spikes() -> None:
    assert find_spikes([10.0 * 0.98**step for step in range(200)], 0, 10.0) == []
    assert find_spikes([3.0] * 10 + [30.0], 0, 10.0) == []


def test_losses_that_do_not_move_have_a_spread_all_the_same() -> None:
    assert find_spikes([2.0] * 50 + [2.1], 0, 10.0) == []
    assert find_spikes([2.0] * 50 + [2.3], 0, 10.0) == [50]


def test_spikes_and_what_is_not_finite_do_not_hide_the_next_spike() -> None:
    losses = [*noisy_losses(60), 9.0, math.nan, 9.0, 3.0, math.inf, 9.0]
    assert find_spikes(losses, 0, 10.0) == [60, 62, 65]


@pytest.fixture
def session(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    faults = getattr(request, "param", {"max_nonfinite_steps": 3})
    config = small_config(write_corpus(tmp_path / "corpus.jsonl"), faults=faults)
    built = build_session(config, ParallelMesh(), torch.device("cpu"), tmp_path)
    yield built
    built.close()


class Poison:
    """Makes one module's output NaN while it is on."""

    def __init__(self, module: nn.Module) -> None:
        self.is_on = True
        module.register_forward_hook(self._spoil)

    def _spoil(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.nan if self.is_on else output


def run_steps(session: Session, watch: FaultWatch, count: int) -> None:
    for _ in range(count):
        run_step(session, watch)


def attention_of(session: Session, block: int) -> nn.Module:
    return next(
        module
        for name, module in session.built.parts[0].named_modules()
        if canonical_name(name) == f"blocks.{block}.attention"
    )


def run_step(session: Session, watch: FaultWatch) -> None:
    start = session.start
    session.metrics.add(train_step(session), 0.0)
    watch.after_step(start)


def test_steps_in_a_row_that_are_not_finite_end_the_run_and_a_tensor_is_named(session: Session) -> None:
    said: list[str] = []
    watch = FaultWatch(session, said.append)
    run_step(session, watch)
    before = {name: param.clone() for name, param in session.engine.model.named_parameters()}
    poison = Poison(attention_of(session, 1))
    for _ in range(2):
        run_step(session, watch)
    poison.is_on = False
    run_step(session, watch)
    assert watch.num_in_a_row == 0, "a good step between begins a new count"
    assert [line.split(":")[1] for line in said] == [
        f" loss or gradient of iteration {iteration} is not finite" for iteration in (2, 3)
    ]
    poison.is_on = True
    for name, param in session.engine.model.named_parameters():
        before[name].copy_(param.detach())
    with pytest.raises(TrainingFaultError, match="last 3 steps \\(to iteration 7\\)") as error:
        run_steps(session, watch, 9)
    assert "the output of blocks.1.attention (PackedAttention) on rank 0" in str(error.value)
    for name, param in session.engine.model.named_parameters():
        assert torch.equal(param, before[name]), name


@pytest.mark.parametrize("session", [{"max_nonfinite_steps": 0}], indirect=True)
def test_without_a_limit_the_run_goes_on(session: Session) -> None:
    watch = FaultWatch(session, print)
    Poison(attention_of(session, 0))
    for _ in range(5):
        run_step(session, watch)
    assert session.optimizer.num_skipped_updates == 5


def test_a_weight_that_is_not_finite_is_named_before_what_it_spoils(session: Session) -> None:
    watch = FaultWatch(session, print)
    param = next(attention_of(session, 0).parameters())
    with torch.no_grad():
        param[0, 0] = torch.inf
    with pytest.raises(TrainingFaultError, match=r"found: the weight blocks\.0\.attention\.\S+ on rank 0"):
        run_steps(session, watch, 4)


def test_a_gradient_is_named_where_it_comes_to_be(session: Session) -> None:
    watch = FaultWatch(session, print)

    def spoil(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * torch.nan)

    session.built.parts[0].get_submodule("blocks.1").register_forward_hook(spoil)
    with pytest.raises(TrainingFaultError, match="the gradient that reaches the output of blocks"):
        run_steps(session, watch, 4)


@pytest.mark.parametrize("session", [{"loss_spike_action": "stop"}], indirect=True)
def test_a_spike_can_stop_the_run(session: Session) -> None:
    said: list[str] = []
    watch = FaultWatch(session, said.append)
    metrics = session.metrics
    metrics.losses, metrics.grad_norms = noisy_losses(50), [1.0] * 50
    watch.after_flush()
    metrics.losses.append(8.0)
    metrics.grad_norms.append(40.0)
    with pytest.raises(TrainingFaultError, match=r"loss spike in iteration 51: 8\.0000, usual 2\.99"):
        watch.after_flush()
    assert metrics.num_loss_spikes == 1


def test_a_spike_is_a_warning_by_default(session: Session) -> None:
    said: list[str] = []
    watch = FaultWatch(session, said.append)
    session.metrics.losses, session.metrics.grad_norms = [*noisy_losses(50), 8.0], [1.0] * 51
    watch.after_flush()
    watch.after_flush()
    assert len(said) == 1
    assert said[0].startswith("warning: loss spike in iteration 51: 8.0000")


def test_an_infinite_loss_with_finite_gradients_is_skipped_too(session: Session) -> None:
    watch = FaultWatch(session, print)
    run_step(session, watch)

    def add_infinity(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + torch.inf

    session.built.parts[0].register_forward_hook(add_infinity)
    before = {name: param.clone() for name, param in session.engine.model.named_parameters()}
    run_step(session, watch)
    assert session.optimizer.num_skipped_updates == 1
    for name, param in session.engine.model.named_parameters():
        assert torch.equal(param, before[name]), name
