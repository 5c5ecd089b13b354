"""A course with stops is held to the straight one: bit for bit under one layout, to rounding under several."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_glue.proofs.courses import TOLERANCES, Case, Course, Stage, judge
from megatron_glue.proofs.layouts import Layout

NUM_PACKS = 6
SAME = Case("same", (Stage(Layout("a", 1), 2), Stage(Layout("a", 1))), "sync")
CHANGED = Case("changed", (Stage(Layout("a", 1), 2), Stage(Layout("b", 2))), "sync")


def straight() -> Course:
    """Three steps of two packs."""
    packs = {step: [2 * step, 2 * step + 1] for step in range(3)}
    batches = {(step, micro): [f"pack {pack}"] for step, ids in packs.items() for micro, pack in enumerate(ids)}
    tensors = {
        "model.w": torch.linspace(1, 2, 8),
        "model.small": torch.linspace(1, 2, 8) * 1e-2,
        "model.null": torch.full((8,), 1e-9),
        "optimizer.w.exp_avg": torch.linspace(1, 2, 8) * 1e-4,
        "optimizer.w.exp_avg_sq": torch.linspace(1, 2, 8) * 1e-8,
        "optimizer.w.step": torch.tensor(3.0),
        "rng.cpu.00000": torch.tensor([1, 2], dtype=torch.uint8),
    }
    return Course([3.0, 2.0, 1.0], [1.0, 1.0, 1.0], batches, packs, tensors)


def test_equal_courses_pass() -> None:
    for case in (SAME, CHANGED):
        verdict = judge(case, straight(), straight(), NUM_PACKS)
        assert verdict.failures == []
        assert verdict.differences.keys() == TOLERANCES.keys()
        assert all(difference.value == 0.0 for difference in verdict.differences.values())


def test_a_course_that_goes_back_is_held_to_the_steps_it_made() -> None:
    course = straight()
    for step in (0, 1):
        del course.packs[step], course.batches[step, 0], course.batches[step, 1]
    assert judge(SAME, course, straight(), NUM_PACKS).failures == []


def restart_the_stream(course: Course) -> None:
    """What F94 is: after the second resume the packs begin anew."""
    course.packs[2] = [0, 1]


def skip_an_epoch(course: Course) -> None:
    """What F98 is: the end of an epoch was taken for the end of all."""
    del course.packs[2]


def tamper(name: str, key: Any, value: Any) -> Callable[[Course], None]:
    def change(course: Course) -> None:
        getattr(course, name)[key] = value

    return change


@pytest.mark.parametrize("case", [SAME, CHANGED], ids=["same", "changed"])
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (restart_the_stream, "step 2 took packs [0, 1], not [4, 5]"),
        (skip_an_epoch, "step 2 took packs None, not [4, 5]"),
        (tamper("losses", 2, 1.00001), "losses differ"),
        (tamper("losses", 2, float("nan")), "losses differ"),
        (lambda course: course.losses.pop(), "losses differ"),
        (tamper("grad_norms", 0, 1.0001), "grad_norms differ"),
        (lambda course: course.grad_norms.pop(), "grad_norms differ"),
        (tamper("tensors", "model.w", torch.linspace(1, 2.001, 8)), "differ"),
    ],
    ids=["F94", "F98", "loss", "NaN", "fewer", "norm", "fewer norms", "weights"],
)
def test_what_is_wrong_is_found(case: Case, change: Callable[[Course], Any], complaint: str) -> None:
    course = copy.deepcopy(straight())
    change(course)
    failures = judge(case, course, straight(), NUM_PACKS).failures
    assert any(complaint in failure for failure in failures), failures


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (tamper("losses", 1, 2.0 + 1e-12), "losses differ from step 1 on"),
        (tamper("grad_norms", 0, 1.0 + 1e-12), "grad_norms differ from step 0 on"),
        (tamper("tensors", "model.w", torch.linspace(1, 2, 8) + 1e-7), "1 of 7 saved tensors differ, e.g. model.w"),
        (tamper("tensors", "model.null", torch.zeros(8)), "1 of 7 saved tensors differ, e.g. model.null"),
        (tamper("tensors", "rng.cpu.00000", torch.tensor(4)), "1 of 7 saved tensors differ, e.g. rng.cpu.00000"),
        (tamper("tensors", "rng.cpu.00001", torch.tensor(4)), "1 of 8 saved tensors differ, e.g. rng.cpu.00001"),
        (tamper("batches", (2, 0), ["pack 4, cut elsewhere"]), "micro-batches are not those"),
    ],
    ids=["loss", "norm", "weights", "zeros", "generator", "one more", "batch"],
)
def test_one_layout_must_be_equal_to_the_last_bit(change: Callable[[Course], None], complaint: str) -> None:
    course = copy.deepcopy(straight())
    change(course)
    assert any(complaint in failure for failure in judge(SAME, course, straight(), NUM_PACKS).failures)
    assert judge(CHANGED, course, straight(), NUM_PACKS).failures == []


def without(name: str) -> Callable[[Course], None]:
    def change(course: Course) -> None:
        del course.tensors[name]

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (tamper("tensors", "model.small", torch.linspace(1, 2.001, 8) * 1e-2), "weights differ by"),
        (tamper("tensors", "optimizer.w.exp_avg", torch.linspace(1, 2.001, 8) * 1e-4), "exp_avg differ by"),
        (tamper("tensors", "optimizer.w.exp_avg_sq", torch.zeros(8)), "exp_avg_sq differ by 1.0e+00"),
        (tamper("tensors", "optimizer.w.step", torch.tensor(3.000001)), "counters differ by"),
        (tamper("tensors", "optimizer.w.more", torch.ones(2)), "more differ by inf"),
        (without("optimizer.w.exp_avg"), "in tensor optimizer.w.exp_avg (missing)"),
        (without("optimizer.w.step"), "in tensor optimizer.w.step (missing)"),
        (without("model.small"), "in tensor model.small (missing)"),
    ],
    ids=["small", "exp_avg", "exp_avg_sq", "step", "one more", "no exp_avg", "no step", "no weight"],
)
def test_every_tensor_counts_when_layouts_change(change: Callable[[Course], None], complaint: str) -> None:
    """One norm over all of them is the norm of the step counters, beside which all others are nothing."""
    course = copy.deepcopy(straight())
    change(course)
    failures = judge(CHANGED, course, straight(), NUM_PACKS).failures
    assert len(failures) == 1
    assert complaint in failures[0]


def test_wrong_tensors_of_a_kind_are_counted() -> None:
    course = straight()
    course.tensors["model.w"] *= 1.001
    course.tensors["model.small"] *= 1.002
    (failure,) = judge(CHANGED, course, straight(), NUM_PACKS).failures
    assert failure == "weights differ by 2.0e-03, allowed 1e-05, in tensor model.small and in 1 others"


def test_generators_belong_to_ranks_and_need_not_be_those_of_another_layout() -> None:
    course = straight()
    del course.tensors["rng.cpu.00000"]
    course.tensors["rng.cpu.00001"] = torch.zeros(2, dtype=torch.uint8)
    assert judge(CHANGED, course, straight(), NUM_PACKS).failures == []


def test_the_straight_run_itself_must_take_every_pack_once() -> None:
    course = straight()
    assert "did not take packs 0 to 6" in judge(SAME, course, course, NUM_PACKS + 1).failures[0]
