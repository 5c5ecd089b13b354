"""kill -9 of any rank at any place: all ranks end soon with one line, and the next start resumes as if nothing was."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_glue.layers.block import DecoderBlock
from megatron_glue.training.checkpoint import tensors as checkpoint_tensors
from megatron_glue.training.checkpoint.files import latest_step
from tests.support.cases import write_corpus
from tests.support.job import SMALL_FLAGS, RankEnd, kill_self, run_job
from tests.support.traps import at_step

WORLD_SIZE = 2
FLAGS = [
    *SMALL_FLAGS,
    *("--num-layers", "2", "--num-experts", "4", "--expert-model-parallel-size", "2", "--global-batch-size", "4"),
    *("--train-iters", "6", "--save-interval", "2", "--save", "run"),
]
KILL_STEP = 5
"""Counted from 1; step 4 has been saved."""
SAVED_STEP = 4
"""The save that is killed under way; step 2 has been saved."""


def in_forward() -> None:
    def forward(*_args: Any, **_kwargs: Any) -> None:
        kill_self()

    DecoderBlock.forward = forward


def in_backward() -> None:
    real = DecoderBlock.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        x_TD = real(*args, **kwargs)
        x_TD.register_hook(lambda _gradient: kill_self())
        return x_TD

    DecoderBlock.forward = forward


def in_a_collective() -> None:
    """While the other rank waits in it."""

    def all_to_all(*_args: Any, **_kwargs: Any) -> None:
        time.sleep(0.5)
        kill_self()

    dist.all_to_all_single = all_to_all


def in_a_save() -> None:
    """While slices are written slowly: half of them are on the disk, the other rank has written its own."""
    real, saves = checkpoint_tensors.write_parts, iter((2, 4, 6))

    def write(path: Path, parts: Any) -> Any:
        if next(saves) == SAVED_STEP:
            parts = list(parts)
            real(path, parts[: len(parts) // 2])
            time.sleep(1.0)
            kill_self()
        return real(path, parts)

    checkpoint_tensors.write_parts = write


def spring(place: str, victim: int, rank: int) -> None:
    if rank != victim:
        return
    if place == "save":
        in_a_save()
    else:
        at_step(KILL_STEP, {"forward": in_forward, "backward": in_backward, "collective": in_a_collective}[place])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("straight")
    write_corpus(folder / "corpus.jsonl")
    return train(folder, [])[0]


def train(folder: Path, more: list[str]) -> tuple[dict[str, Any], list[RankEnd]]:
    ends = run_job([*FLAGS, *more], folder, WORLD_SIZE)
    assert [end.code for end in ends] == [0, 0], ends
    return json.loads((folder / "summary.json").read_text()), ends


CASES = [(place, []) for place in ("forward", "backward", "collective", "save")] + [("save", ["--async-save"])]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("place", "more"), CASES, ids=lambda value: value if isinstance(value, str) else "".join(value)
)
def test_f99_a_killed_rank_ends_the_job_and_the_next_start_resumes(
    place: str, more: list[str], victim: int, straight: dict[str, Any], tmp_path: Path
) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    start = time.monotonic()
    ends = run_job([*FLAGS, *more], tmp_path, WORLD_SIZE, functools.partial(spring, place, victim))
    assert time.monotonic() - start < 60, "a lost rank is noticed at once, not after the collective's timeout"
    survivor = ends[1 - victim]
    assert ends[victim].code == -9
    assert survivor.code == 1
    assert len(survivor.error_lines) == 1, survivor.err
    assert "another rank failed" in survivor.error_lines[0]
    assert "Traceback" not in survivor.err

    expected_step = 2 if place == "save" else 4
    assert latest_step(tmp_path / "run") == expected_step
    resumed, ends = train(tmp_path, more)
    assert f"resuming from run/step_{expected_step:08d} at iteration {expected_step}" in ends[0].out
    for name in ("losses", "grad_norms", "heldout_loss"):
        assert resumed[name] == straight[name], name
    assert not list((tmp_path / "run").glob("*incomplete*"))
