from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.generation import SamplingPlan, printable, sample_continuation
from megatron_glue.types import ForwardContext, PackedSequence

CPU = torch.device("cpu")


def count_up(input_ids_T: Tensor, context: ForwardContext, row: int) -> Tensor:
    """A model that is sure of the successor of the last token."""
    assert context.sequence.num_tokens == len(input_ids_T) == row + 1
    logits = torch.full((10,), -100.0)
    logits[(int(input_ids_T[row]) + 1) % 10] = 100.0
    return logits


def test_continues_with_what_the_model_says() -> None:
    plan = SamplingPlan(num_tokens=4, max_context_tokens=3)
    assert sample_continuation(count_up, [1, 2], plan, CPU, ParallelMesh()) == [3, 4, 5, 6]


def test_stops_at_the_end_token() -> None:
    plan = SamplingPlan(num_tokens=9, max_context_tokens=8, end_token=5)
    assert sample_continuation(count_up, [2], plan, CPU, ParallelMesh()) == [3, 4]


def test_repeats_with_the_same_seed_and_differs_with_another() -> None:
    def uniform(input_ids_T: Tensor, context: ForwardContext, row: int) -> Tensor:
        return torch.zeros(10)

    def draw(seed: int) -> list[int]:
        return sample_continuation(uniform, [0], SamplingPlan(20, 8, seed=seed), CPU, ParallelMesh())

    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert torch.equal(torch.get_rng_state(), state), "sampling leaves the global generator alone"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_ids"):
        sample_continuation(count_up, [], SamplingPlan(1, 8), CPU, ParallelMesh())


def test_control_characters_are_escaped() -> None:
    assert printable("a\x07\x1b[31m\x00b\n\tc\u00e4") == "a\\x07\\x1b[31m\\x00b\n\tc\u00e4"


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_sequence_parallel_ranks_split_a_padded_window_evenly(tp_rank: int) -> None:
    mesh = ParallelMesh(sizes={"tensor": 2}, ranks={"tensor": tp_rank}, sequence_parallel=True)
    rows: list[slice | None] = []

    def next_logits(input_ids_T: Tensor, context: ForwardContext, row: int) -> Tensor:
        assert len(input_ids_T) == context.sequence.num_tokens
        assert context.sequence.num_valid_tokens == row + 1
        rows.append(context.residual_rows)
        return count_up(input_ids_T[: row + 1], replace(context, sequence=PackedSequence.from_lengths([row + 1])), row)

    assert sample_continuation(next_logits, [1, 2], SamplingPlan(3, 8), CPU, mesh) == [3, 4, 5]
    sizes = [1, 2, 2]
    assert rows == [slice(tp_rank * size, (tp_rank + 1) * size) for size in sizes]
