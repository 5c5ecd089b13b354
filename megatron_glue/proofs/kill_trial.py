"""A run that is killed again and again, and what must be true of it after every kill and at its end.

Each round starts the run's command, waits for a moment that was drawn from (seed, round), kills one of its processes
with SIGKILL, waits for the others to end by themselves, and looks at what is on the disk. Rounds are noted in a file,
so that a trial can be stopped and go on. At its end the run must have taken the course of one that nobody killed.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.proofs.comparison import relative_difference
from megatron_glue.proofs.layouts import Layout
from megatron_glue.proofs.local_jobs import LocalJob, wait_until
from megatron_glue.training.checkpoint.files import (
    INCOMPLETE_SUFFIX,
    CheckpointError,
    latest_step,
    published_steps,
    step_folder,
    verify_files,
)

SAVE_INTERVAL, WINDOW_STEPS = 4, 8
FLAGS = (
    "--log-interval=1 --progress=plain --sample-tokens=0 --eval-iters=1 --eval-interval=0 "
    f"--save-interval={SAVE_INTERVAL} --keep-last=3 --distributed-timeout-minutes=1"
).split()
"""What a run must be told so that a trial can follow it."""
MOMENTS = ("saving",) * 4 + ("training",) * 4 + ("starting",) * 2
STEP = re.compile(r"^iteration +(\d+)/", re.MULTILINE)
RESUMED = re.compile(r"^resuming from .* at iteration (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Plan:
    """What a round is to do.

    Attributes:
        number: The round.
        layout: Name of the layout.
        saves: ``sync`` or ``async``.
        moment: ``starting``, ``training`` or ``saving``.
        victim: ``launcher``, or a rank's number.
        count: Steps after the start (training), or saves after it (saving), until the kill.
        delay_s: What is waited then; for ``starting`` all there is.
    """

    number: int
    layout: str
    saves: str
    moment: str
    victim: str
    count: int
    delay_s: float

    @classmethod
    def draw(cls, number: int, seed: int, layout: Layout) -> Plan:
        """Draw a round; the same number and seed always give the same one."""
        rng = random.Random(f"{seed}/{number}")  # noqa: S311  nothing here is a secret
        moment = rng.choice(MOMENTS)
        victims = ["launcher", *map(str, range(layout.world_size))] if layout.world_size > 1 else ["0"]
        count = {"starting": 0, "training": rng.randint(1, WINDOW_STEPS), "saving": rng.randint(1, 2)}[moment]
        delay_s = {"starting": rng.uniform(0, 1.0), "training": rng.uniform(0, 0.05), "saving": rng.uniform(0, 0.03)}
        saves = "async" if number % 2 else "sync"
        return cls(number, layout.name, saves, moment, rng.choice(victims), count, delay_s[moment])


@dataclass
class Round:
    """What happened in a round.

    Attributes:
        plan: What was planned.
        resumed_from: Step that the job said it resumed from; ``None`` if it was killed before.
        published: Newest published step after the kill; -1 for none.
        unfinished: Whether it left an unpublished folder.
        end_seconds: Time until all processes had ended.
        seconds: Wall time of the round.
        failures: What went wrong, a line each.
    """

    plan: Plan
    resumed_from: int | None = None
    published: int = -1
    unfinished: bool = False
    end_seconds: float = 0.0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TrialSettings:
    """How a run is to be killed.

    Attributes:
        num_kills: Rounds.
        seed: Of moments and victims.
        tolerance: Relative difference of losses that is allowed when several layouts take turns.
        is_cold: Start commands instead of forking processes.
        end_timeout_s: Longest time for the other processes to end.
        run_timeout_s: Longest time of one start; ``None``: what a slow machine needs for all steps.
    """

    num_kills: int
    seed: int = 0
    tolerance: float = 1e-3
    is_cold: bool = False
    end_timeout_s: float = 30.0
    run_timeout_s: float | None = None

    @property
    def num_steps(self) -> int:
        """Steps of a run that is long enough to be killed so often: most rounds end less than a window further on."""
        return self.num_kills * WINDOW_STEPS + 40

    @property
    def longest_run_s(self) -> float:
        """Limit of one start."""
        return max(900.0, 2.0 * self.num_steps) if self.run_timeout_s is None else self.run_timeout_s


class KillTrial:
    """The run that is killed, in a folder.

    Args:
        folder: Of the run and the trial's notes.
        flags: The command, but for layout and way of saving.
        layouts: Which take turns.
        settings: How it is killed.

    Raises:
        ConfigError: If the folder holds the notes of another trial.
    """

    def __init__(self, folder: Path, flags: Sequence[str], layouts: Sequence[Layout], settings: TrialSettings) -> None:
        self._folder = folder
        self._flags = tuple(flags)
        self._layouts = tuple(layouts)
        self._settings = settings
        self._root = folder / "run"
        self._notes = folder / "rounds.jsonl"
        self._check_folder()

    def rounds(self) -> Iterator[Round]:
        """Kill until it is enough, going on after the rounds that are noted already."""
        done = self.noted()
        published = done[-1].published if done else -1
        for number in range(len(done), self._settings.num_kills):
            result = self._run_round(number, published)
            published = result.published
            with self._notes.open("a", encoding="utf-8") as notes:
                notes.write(json.dumps(asdict(result)) + "\n")
            yield result

    def noted(self) -> list[Round]:
        """The rounds so far."""
        if not self._notes.exists():
            return []
        lines = self._notes.read_text(encoding="utf-8").splitlines()
        return [Round(Plan(**entry.pop("plan")), **entry) for entry in map(json.loads, lines)]

    def _check_folder(self) -> None:
        own = {"flags": list(self._flags), "layouts": [asdict(layout) for layout in self._layouts]}
        own |= {"kills": self._settings.num_kills, "seed": self._settings.seed}
        text, path = json.dumps(own), self._folder / "trial.json"
        if path.exists() and path.read_text(encoding="utf-8") != text:
            remedy = "give the same flags as before, or another folder"
            raise ConfigError("--folder", self._folder, "holds a trial with other flags", remedy)
        path.write_text(text, encoding="utf-8")

    def finish(self) -> tuple[list[str], dict[str, Any]]:
        """Let the run come to its end, and compare its course with that of one which nobody killed.

        Returns:
            What is wrong, and the figures.
        """
        killed = self._run_to_end("run", self._layouts[len(self.noted()) % len(self._layouts)], "sync")
        whole = self._run_to_end("whole", self._layouts[0], "sync", "--save-interval", "0")
        failures: list[str] = []
        figures: dict[str, Any] = {"steps": len(whole["losses"])}
        for name in ("losses", "grad_norms"):
            own, expected = (torch.tensor(summary[name], dtype=torch.float64) for summary in (killed, whole))
            if own.shape != expected.shape:
                failures.append(f"{len(own)} {name} instead of {len(expected)}")
                continue
            values = [relative_difference(a, b) for a, b in zip(own, expected, strict=True)]
            figures[f"largest_difference_of_{name}"] = max(values, default=0.0)
            allowed = 0.0 if len(self._layouts) == 1 else self._settings.tolerance
            wrong = [step for step, value in enumerate(values) if not value <= allowed]
            if wrong and (name == "losses" or allowed == 0.0):
                first = f"first at step {wrong[0]} by {values[wrong[0]]:.1e}"
                failures.append(f"{name} differ at {len(wrong)} steps, {first}")
        return failures, figures

    def _start(self, name: str, layout: Layout, saves: str, *more: str) -> LocalJob:
        flags = [*self._flags, *layout.flags, *more, "--save", str(self._folder / name)]
        flags += ["--summary-path", str(self._folder / f"{name}.json")] + (["--async-save"] if saves == "async" else [])
        log_path = self._folder / f"{name}.log"
        return LocalJob(flags, layout.world_size, log_path, is_cold=self._settings.is_cold)

    def _run_to_end(self, name: str, layout: Layout, saves: str, *more: str) -> dict[str, Any]:
        job = self._start(name, layout, saves, *more)
        try:
            if not wait_until(lambda: job.exit_code is not None, self._settings.longest_run_s):
                raise CheckpointError(f"{name} still ran after {self._settings.longest_run_s} s")
        finally:
            job.end()
        if job.exit_code != 0:
            raise CheckpointError(f"{name} ended with {job.exit_code}: {_last_words(job)}")
        return json.loads((self._folder / f"{name}.json").read_text(encoding="utf-8"))

    def _run_round(self, number: int, published_before: int) -> Round:
        layout = self._layouts[number % len(self._layouts)]
        plan = Plan.draw(number, self._settings.seed, layout)
        result = Round(plan)
        start, start_ns = time.monotonic(), time.time_ns()
        job = self._start("run", layout, plan.saves)
        saves: set[str] = set()

        def has_come() -> bool:
            if plan.moment == "training":
                steps = STEP.findall(job.log())
                return bool(steps) and int(steps[-1]) >= max(published_before, 0) + plan.count
            saves.update(self._saves_since(start_ns))
            return plan.moment == "starting" or len(saves) >= plan.count

        try:
            wait_until(lambda: has_come() or job.exit_code is not None, self._settings.longest_run_s)
            time.sleep(plan.delay_s)
            if job.exit_code is not None:
                result.failures.append(f"ended by itself with {job.exit_code}: {_last_words(job)}")
            elif not has_come():
                result.failures.append(f"the moment did not come within {self._settings.longest_run_s:.0f} s")
            everybody = job.processes()
            ranks = job.ranks()
            # Right after a start there may be no rank yet.
            is_there = plan.victim.isdigit() and int(plan.victim) < len(ranks)
            (ranks[int(plan.victim)] if is_there else job.launcher).kill()
            killed_at = time.monotonic()
            left = job.wait(self._settings.end_timeout_s)
            result.end_seconds = time.monotonic() - killed_at
            if left:
                ran_on = f"{len(left)} of {len(everybody)} processes ran on"
                result.failures.append(f"{ran_on} for {result.end_seconds:.0f} s")
        finally:
            job.end()
        self._inspect(result, job, published_before, start_ns)
        result.seconds = time.monotonic() - start
        return result

    def _saves_since(self, start_ns: int) -> list[str]:
        """Unpublished folders that a job has touched; one that an earlier job left behind is not among them."""
        found = []
        for path in self._root.glob(f"*{INCOMPLETE_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime_ns > start_ns:
                    found.append(path.name)
        return found

    def _inspect(self, result: Round, job: LocalJob, published_before: int, start_ns: int) -> None:
        """Look at what the kill has left. An unpublished folder of an earlier round is not this round's."""
        result.unfinished = bool(self._saves_since(start_ns))
        steps = published_steps(self._root)
        for step in steps:
            try:
                verify_files(step_folder(self._root, step))
            except CheckpointError as error:
                result.failures.append(str(error))
        # Nobody goes back here, so the next start must take the newest one, whatever ``latest`` says.
        result.published = max(steps, default=-1)
        if steps and (chosen := latest_step(self._root)) != result.published:
            resumed = f"the next start would resume from step {chosen}"
            result.failures.append(f"step {result.published} is published, {resumed}")
        if result.published < published_before:
            result.failures.append(f"step {result.published} is newest, step {published_before} was published before")
        if resumed := RESUMED.search(job.log()):
            result.resumed_from = int(resumed.group(1))
        started = STEP.search(job.log()) is not None
        expected = None if published_before < 0 else published_before
        if result.resumed_from != expected and (started or result.resumed_from is not None):
            result.failures.append(f"started from step {result.resumed_from}, step {expected} was there")


def _last_words(job: LocalJob) -> str:
    """The error lines of a job, or the last line it said."""
    lines = job.log().strip().splitlines()
    return "; ".join([line for line in lines if line.startswith("error: ")] or lines[-1:]) or "silent"
