from __future__ import annotations

import itertools

import pytest
import torch

from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.metrics import RunMetrics, StepResult, counted_once


def result(loss: float, counts: list[list[int]] | None = None) -> StepResult:
    return StepResult(
        loss=torch.tensor(loss),
        grad_norm=torch.tensor(2 * loss),
        lr=0.1,
        num_tokens=100,
        expert_counts_LE=None if counts is None else torch.tensor(counts),
        num_dropped=None if counts is None else torch.tensor(1),
        aux_losses=None if counts is None else torch.tensor([loss, loss + 1]),
    )


def test_steps_wait_unread_until_the_flush() -> None:
    metrics, reader = RunMetrics(), HostReader()
    for loss in (3.0, 2.0, 1.0):
        metrics.add(result(loss), 0.5)
    assert reader.count == 0
    assert metrics.losses == []
    metrics.flush(reader, None)
    assert reader.count == 1, "one read, however many steps waited"
    assert metrics.losses == [3.0, 2.0, 1.0]
    assert metrics.grad_norms == [6.0, 4.0, 2.0]
    metrics.flush(reader, None)
    assert reader.count == 1


def test_expert_counts_add_up_over_flushes() -> None:
    metrics, reader = RunMetrics(), HostReader()
    metrics.add(result(1.0, [[1, 2], [3, 4]]), 0.5)
    metrics.flush(reader, None)
    metrics.add(result(1.0, [[10, 20], [30, 40]]), 0.5)
    metrics.add(result(4.0, [[100, 200], [300, 400]]), 0.5)
    metrics.flush(reader, None)
    assert metrics.expert_counts == [[111, 222], [333, 444]]
    assert metrics.num_dropped == 3
    assert metrics.aux_losses == [4.0, 5.0]


def test_throughput_leaves_the_first_step_out() -> None:
    metrics = RunMetrics()
    metrics.add(result(1.0), 100.0)
    metrics.add(result(1.0), 0.5)
    metrics.add(result(1.0), 1.5)
    assert metrics.tokens_per_second() == pytest.approx(100.0)
    assert metrics.tokens_per_second(last_steps=1) == pytest.approx(100 / 1.5)


def test_a_repeated_step_takes_the_place_of_its_first_run() -> None:
    metrics, first = RunMetrics(), result(0.1)
    metrics.replace(first, result(9.0))
    metrics.add(first, 0.5)
    metrics.add(result(0.2), 0.5)
    metrics.replace(first, result(0.3))
    metrics.flush(HostReader(), None)
    assert metrics.losses == pytest.approx([0.3, 0.2])
    assert metrics.num_tokens == 200


def test_history_survives_a_checkpoint() -> None:
    metrics, restored = RunMetrics(), RunMetrics()
    metrics.add(result(0.1), 0.5)
    with pytest.raises(AssertionError, match="flush"):
        metrics.state_dict()
    metrics.flush(HostReader(), None)
    restored.load_state_dict(metrics.state_dict())
    assert restored.losses == metrics.losses
    assert restored.num_tokens == 100
    restored.losses.append(1.0)
    assert len(metrics.losses) == 1, "a restored history is a copy"


def test_a_sum_that_several_ranks_hold_is_counted_by_one_of_them() -> None:
    sizes = {"pp": 2, "dp": 2, "cp": 2, "tensor": 2}
    shares = [
        counted_once(torch.tensor(3.0), ParallelMesh(sizes=sizes, ranks={"pp": pp, "dp": dp, "cp": cp, "tensor": tp}))
        for pp, dp, cp, tp in itertools.product(range(2), repeat=4)
    ]
    assert sum(shares) == 3.0 * 2 * 2, "dp and cp ranks have tokens of their own"
