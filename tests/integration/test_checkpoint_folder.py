"""Two runs and one folder of checkpoints, as their users see it."""

from __future__ import annotations

import functools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_glue.training import loop
from megatron_glue.training.checkpoint.files import describe_files, latest_step, read_manifest, write_manifest
from tests.support.cases import write_corpus
from tests.support.job import SMALL_FLAGS, RankEnd, kill_self, run_job

FLAGS = [
    *SMALL_FLAGS,
    *("--num-layers", "1", "--num-experts", "2", "--global-batch-size", "2", "--save", "run", "--save-interval", "2"),
]


def act_at_step(number: int, action: str, _rank: int) -> None:
    """Stop for a while, or die, at the start of a step, counted from 1."""
    real, steps = loop.train_step, iter(range(1, 100))

    @functools.wraps(real)
    def train_step(session: Any) -> Any:
        if next(steps) == number:
            kill_self() if action == "die" else wait_for_the_other()
        return real(session)

    loop.train_step = train_step


def wait_for_the_other() -> None:
    Path("is-training").touch()
    deadline = time.monotonic() + 60
    while not Path("go-on").exists() and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus.jsonl")
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run").iterdir())


def test_a_second_run_into_the_same_folder_is_refused_on_all_ranks(folder: Path) -> None:
    ends: list[RankEnd] = []
    trap = functools.partial(act_at_step, 3, "wait")
    first = threading.Thread(target=lambda: ends.extend(run_job([*FLAGS, "--train-iters", "4"], folder, 1, trap)))
    first.start()
    while not (folder / "is-training").exists():
        assert first.is_alive(), ends
        time.sleep(0.05)
    before = names(folder)
    second = run_job([*FLAGS, "--train-iters", "6"], folder, 2)
    (folder / "go-on").touch()
    first.join()
    line = "--save=run: another run writes into it; wait for its end, or choose another folder"
    assert [end.code for end in second] == [2, 2], second
    assert [end.error_lines for end in second] == [[f"error: {line}"], [f"error: [rank 1] {line}"]]
    assert before == [".lock", "env.json", "latest", "metrics.jsonl", "step_00000002"]
    assert ends[0].code == 0, ends
    assert names(folder) == ["env.json", "latest", "metrics.jsonl", "step_00000002", "step_00000004", "summary.json"]


def test_a_run_starts_again_at_once_after_kill_and_after_its_end(folder: Path) -> None:
    (end,) = run_job([*FLAGS, "--train-iters", "4"], folder, 1, functools.partial(act_at_step, 3, "die"))
    assert (end.code, latest_step(folder / "run")) == (-9, 2)
    assert ".lock" in names(folder)
    for _ in range(2):
        (end,) = run_job([*FLAGS, "--train-iters", "4"], folder, 1)
        assert end.code == 0, end
        assert ".lock" not in names(folder)
    assert "the run has finished its iterations" in end.out
    assert json.loads((folder / "run/summary.json").read_text())["iterations"] == 4


def test_a_start_that_is_refused_leaves_no_folder(folder: Path) -> None:
    (end,) = run_job([*FLAGS, "--data-path", "nothing.jsonl"], folder, 1)
    assert end.code == 2, end
    assert not (folder / "run").exists()


def test_why_a_run_falls_back_comes_first_and_the_damaged_step_does_not_count(folder: Path) -> None:
    (end,) = run_job([*FLAGS, "--train-iters", "6"], folder, 1)
    assert end.code == 0, end
    shard = folder / "run/step_00000006/__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    more = ["--train-iters", "8", "--save-interval", "7", "--keep-last", "2", "--load-fallback"]
    (end,) = run_job([*FLAGS, *more], folder, 1)
    assert end.code == 0, end
    lines = [line.split(" ")[0] for line in end.out.splitlines() if "run/step_00000004" in line]
    assert lines[:2] == ["warning:", "resuming"]
    assert [name for name in names(folder) if name.startswith("step_")] == [f"step_0000000{step}" for step in (6, 7, 8)]


def test_facts_that_only_the_session_understands_are_one_line_if_malformed(folder: Path) -> None:
    (end,) = run_job([*FLAGS, "--train-iters", "2"], folder, 1)
    assert end.code == 0, end
    path = folder / "run/step_00000002/meta.json"
    good = json.loads(path.read_bytes())
    counters, position = good["counters"], good["data_position"]
    for malformed in (
        {"counters": {"losses": counters["losses"]}},
        {"counters": {**counters, "num_tokens": "many"}},
        {"data_position": {**position, "epoch": float("inf")}},
    ):
        path.write_text(json.dumps({**good, **malformed}))
        write_manifest(path.parent, read_manifest(path.parent) | describe_files([path]))
        (end,) = run_job([*FLAGS, "--train-iters", "4"], folder, 1)
        assert (end.code, len(end.err.splitlines())) == (1, 1), end
        assert end.err.startswith("error: run/step_00000002/meta.json: damaged, ")
