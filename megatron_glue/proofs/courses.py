"""Courses of a run: with or without stops, each start in new processes, through real checkpoints; and their comparison.

A course is what a run did from its first step to its last: micro-batches, losses, norms, and the tensors of the last
checkpoint. One with stops must be the straight one: bit for bit under one layout, to rounding when layouts change.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_glue.proofs.comparison import Difference, relative_difference, tensor_differences
from megatron_glue.proofs.layouts import Layout
from megatron_glue.proofs.local_training import LocalRun, train_locally
from megatron_glue.training.checkpoint.files import step_folder
from megatron_glue.training.checkpoint.parts import GlobalTensor
from megatron_glue.training.checkpoint.store import read_facts_and_index
from megatron_glue.training.checkpoint.tensors import read_parts

# What may differ where layouts change, by kind: relative, of every step and every tensor by itself.
TOLERANCES = {
    "losses": 1e-6,
    "grad_norms": 1e-6,
    "weights": 1e-5,
    "exp_avg": 1e-5,
    "exp_avg_sq": 1e-5,
    "counters": 0.0,
}


@dataclass(frozen=True)
class Stage:
    """One start of a run.

    Attributes:
        layout: How the work is divided.
        stop_at: Step at which it saves and stops; 0 for the run's end.
        goes_back: Whether it starts from the straight run's checkpoint of ``stop_at``, and goes on to the end.
    """

    layout: Layout
    stop_at: int = 0
    goes_back: bool = False


@dataclass(frozen=True)
class Case:
    """A course with stops that is compared with the straight one of its first layout.

    Attributes:
        name: For people.
        stages: The starts.
        saves: ``sync`` or ``async``.
    """

    name: str
    stages: tuple[Stage, ...]
    saves: str

    @property
    def is_exact(self) -> bool:
        """Whether all starts have one layout."""
        return len({stage.layout.name for stage in self.stages}) == 1


@dataclass
class Course:
    """What a run did from its first step to its last.

    Attributes:
        losses: By step.
        grad_norms: By step.
        batches: (step, global micro-batch) -> what each of its shards was, shards in order.
        packs: Step -> pack ids in order.
        tensors: Those of the last checkpoint.
    """

    losses: list[float]
    grad_norms: list[float]
    batches: dict[tuple[int, int], list[str]]
    packs: dict[int, list[int]]
    tensors: dict[str, Tensor]


@dataclass
class Verdict:
    """How a case came out.

    Attributes:
        case: The case.
        failures: What differs; empty if nothing does.
        differences: Kind of quantity, of ``TOLERANCES`` -> the one of that kind that differs most.
        seconds: Wall time.
    """

    case: Case
    failures: list[str] = field(default_factory=list)
    differences: dict[str, Difference] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "course": self.case.name,
            "saves": self.case.saves,
            "must_be_bit_equal": self.case.is_exact,
            "status": "failed" if self.failures else "ok",
            "failures": self.failures,
            "differences": {
                kind: {"largest": worst.value if math.isfinite(worst.value) else None, "in": worst.what}
                for kind, worst in self.differences.items()
            },
            "seconds": round(self.seconds, 2),
        }


class CourseRunner:
    """Runs courses in folders of their own.

    Args:
        folder: Room for them.
        flags: Flags of every start, but for layout and stops.
        num_steps: Steps of a whole run, 2N.
        timeout_s: Limit of one start.
    """

    def __init__(self, folder: Path, flags: Sequence[str], num_steps: int, timeout_s: float) -> None:
        self._folder = folder
        self._flags = tuple(flags)
        self._num_steps = num_steps
        self._timeout_s = timeout_s
        self._straight: dict[tuple[str, str], tuple[Path, Course]] = {}
        self._num_runs = 0

    def straight(self, layout: Layout, saves: str) -> tuple[Path, Course]:
        """The folder of checkpoints and the course of a run without a stop."""
        key = (layout.name, saves)
        if key not in self._straight:
            self._straight[key] = self.run((Stage(layout),), saves)
        return self._straight[key]

    def run(self, stages: Iterable[Stage], saves: str) -> tuple[Path, Course]:
        """Run start after start.

        Args:
            stages: The starts, in order.
            saves: ``sync`` or ``async``.

        Returns:
            Folder of checkpoints, and the course.

        Raises:
            LocalRunError: If a start does not end well.
            RankFailedError: If one of its ranks dies or hangs.
        """
        self._num_runs += 1
        folder = self._folder / str(self._num_runs)
        root, summary_path = folder / "run", folder / "summary.json"
        reports: list[dict[str, Any]] = []
        for index, stage in enumerate(stages):
            flags = [*self._flags, *stage.layout.flags, "--save", str(root), "--summary-path", str(summary_path)]
            flags += ["--async-save"] if saves == "async" else []
            if stage.goes_back:
                flags += ["--load", str(step_folder(self.straight(stage.layout, saves)[0], stage.stop_at))]
            elif stage.stop_at:
                flags += ["--exit-interval", str(stage.stop_at)]
            run = LocalRun(tuple(flags), stage.layout.world_size, self._timeout_s)
            reports += train_locally(run, folder / f"start_{index + 1}")
        summary = json.loads(summary_path.read_text(encoding="utf-8"))
        tensors = read_tensors(step_folder(root, self._num_steps))
        return root, Course(summary["losses"], summary["grad_norms"], *_data_of(reports), tensors)


def _data_of(reports: Sequence[Mapping[str, Any]]) -> tuple[dict[tuple[int, int], list[str]], dict[int, list[int]]]:
    """What was trained on, by micro-batch and by step; ranks that share a shard are taken once."""
    shards: dict[tuple[int, int], dict[int, str]] = {}
    packs: dict[tuple[int, int], list[int]] = {}
    for report in reports:
        for batch in report["batches"]:
            key = (batch["step"], batch["micro_batch"])
            shards.setdefault(key, {})[report["cp_rank"]] = batch["documents"] + batch["rows"]
            packs[key] = batch["pack_ids"]
    by_step: dict[int, list[int]] = {}
    for step, micro_batch in sorted(packs):
        by_step.setdefault(step, []).extend(packs[step, micro_batch])
    return {key: [parts[rank] for rank in sorted(parts)] for key, parts in shards.items()}, by_step


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a checkpoint, whole.

    Raises:
        CheckpointError: If one cannot be read.
    """
    _, index = read_facts_and_index(path)
    tensors = {name: torch.empty(saved.shape, dtype=saved.dtype) for name, saved in index.items()}
    read_parts(path, index, {name: GlobalTensor.whole(tensor) for name, tensor in tensors.items()})
    return tensors


def judge(case: Case, course: Course, straight: Course, num_packs: int) -> Verdict:
    """Compare a course with the straight one.

    Args:
        case: Its kind decides what may differ.
        course: With stops.
        straight: Without.
        num_packs: Packs of a whole run.
    """
    verdict = Verdict(case)
    first = min(course.packs, default=0)
    expected = {step: packs for step, packs in straight.packs.items() if step >= first}
    if course.packs != expected:
        wrong = [step for step in sorted(expected | course.packs) if course.packs.get(step) != expected.get(step)]
        step = wrong[0]
        verdict.failures.append(f"step {step} took packs {course.packs.get(step)}, not {expected.get(step)}")
    taken = [pack for step in sorted(straight.packs) for pack in straight.packs[step]]
    if taken != list(range(num_packs)):
        verdict.failures.append(f"the straight run did not take packs 0 to {num_packs - 1} in order")
    found = _differences(course, straight)
    verdict.differences = {kind: max(of_kind, key=lambda d: d.value) for kind, of_kind in found.items() if of_kind}
    if case.is_exact:
        verdict.failures += _inexact(course, straight, first)
        return verdict
    for kind, of_kind in found.items():
        # An optimizer's tensors of other names are held to what weights are held to.
        allowed = TOLERANCES.get(kind, TOLERANCES["weights"])
        if num_wrong := sum(not difference.value <= allowed for difference in of_kind):
            worst = verdict.differences[kind]
            others = f" and in {num_wrong - 1} others" if num_wrong > 1 else ""
            verdict.failures.append(
                f"{kind} differ by {worst.value:.1e}, allowed {allowed:.0e}, in {worst.what}{others}"
            )
    return verdict


def _differences(course: Course, straight: Course) -> dict[str, list[Difference]]:
    """Kind of quantity -> how far each one of that kind is off. Generators' states are not compared, ranks own them."""
    found = {
        "losses": _by_step(course.losses, straight.losses),
        "grad_norms": _by_step(course.grad_norms, straight.grad_norms),
    }
    own, expected = _by_kind(course.tensors), _by_kind(straight.tensors)
    for kind in sorted(own.keys() | expected.keys()):
        found[kind] = list(tensor_differences("tensor", own.get(kind, {}), expected.get(kind, {})))
    return found


def _by_kind(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors of a checkpoint apart by what they are: moments are orders of magnitude smaller than weights."""
    kinds: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        room, last = name.partition(".")[0], name.rpartition(".")[2]
        if room == "rng":
            continue
        is_counter = last == "step" or not tensor.is_floating_point()
        kind = "counters" if is_counter else "weights" if room == "model" else last
        kinds.setdefault(kind, {})[name] = tensor
    return kinds


def _inexact(course: Course, straight: Course, first: int) -> list[str]:
    """Whatever is not the same to the last bit."""
    failures = []
    batches = {key: shards for key, shards in straight.batches.items() if key[0] >= first}
    if course.batches != batches:
        failures.append("micro-batches are not those of the straight run")
    for name in ("losses", "grad_norms"):
        own, expected = getattr(course, name), getattr(straight, name)
        wrong = [step for step in range(len(expected)) if own[step : step + 1] != expected[step : step + 1]]
        if wrong or len(own) != len(expected):
            failures.append(f"{name} differ from step {wrong[0] if wrong else len(expected)} on")
    names = sorted(course.tensors.keys() | straight.tensors.keys())
    differing = [n for n in names if not _equal(course.tensors.get(n), straight.tensors.get(n))]
    if differing:
        failures.append(f"{len(differing)} of {len(names)} saved tensors differ, e.g. {differing[0]}")
    return failures


def _equal(left: Tensor | None, right: Tensor | None) -> bool:
    return left is not None and right is not None and left.dtype == right.dtype and torch.equal(left, right)


def _by_step(own: Sequence[float], expected: Sequence[float]) -> list[Difference]:
    if len(own) != len(expected):
        return [Difference(f"{len(own)} instead of {len(expected)} steps", math.inf)]
    pairs = zip(torch.tensor(own, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), strict=True)
    return [Difference(f"step {step}", relative_difference(*pair)) for step, pair in enumerate(pairs)]
