from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_glue.training.generation import SamplingPlan, printable, sample_continuation
from megatron_glue.types import ForwardContext

CPU = torch.device("cpu")


def count_up(input_ids_T: Tensor, context: ForwardContext, row: int) -> Tensor:
    """A model that is sure of the successor of the last token."""
    assert context.sequence.num_tokens == len(input_ids_T) == row + 1
    logits = torch.full((10,), -100.0)
    logits[(int(input_ids_T[row]) + 1) % 10] = 100.0
    return logits


def test_continues_with_what_the_model_says() -> None:
    plan = SamplingPlan(num_tokens=4, max_context_tokens=3)
    assert sample_continuation(count_up, [1, 2], plan, CPU) == [3, 4, 5, 6]


def test_stops_at_the_end_token() -> None:
    plan = SamplingPlan(num_tokens=9, max_context_tokens=8, end_token=5)
    assert sample_continuation(count_up, [2], plan, CPU) == [3, 4]


def test_repeats_with_the_same_seed_and_differs_with_another() -> None:
    def uniform(input_ids_T: Tensor, context: ForwardContext, row: int) -> Tensor:
        return torch.zeros(10)

    def draw(seed: int) -> list[int]:
        return sample_continuation(uniform, [0], SamplingPlan(20, 8, seed=seed), CPU)

    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert torch.equal(torch.get_rng_state(), state), "sampling leaves the global generator alone"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_ids"):
        sample_continuation(count_up, [], SamplingPlan(1, 8), CPU)


def test_control_characters_are_escaped() -> None:
    assert printable("a\x07\x1b[31m\x00b\n\tc\u00e4") == "a\\x07\\x1b[31m\\x00b\n\tc\u00e4"


def test_ranks_go_on_with_the_token_they_agreed_on() -> None:
    plan = SamplingPlan(num_tokens=3, max_context_tokens=8)
    assert sample_continuation(count_up, [1], plan, CPU, agree=lambda token: token * 0 + 7) == [7, 7, 7]
