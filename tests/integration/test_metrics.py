"""What a run reports of itself: scraped while it runs, in its file, in wandb's files, over a resume, on ranks."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_glue.parallel.local_ranks import free_port
from megatron_glue.training.telemetry.record import METRICS
from tests.support.cases import write_corpus
from tests.support.commands import run, start, succeed

SMALL = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "64"),
    *("--global-batch-size", "4", "--heldout-fraction", "0.2", "--eval-iters", "1", "--eval-interval", "2"),
    *("--log-interval", "1", "--metrics-interval", "1", "--sample-tokens", "0", "--device", "cpu"),
    *("--num-experts", "4", "--moe-ffn-hidden-size", "16"),
]
COMMAND = ["pretrain_moe.py", *SMALL]
ENDLESS = "1000000"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl"))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scrape(port: int, process: subprocess.Popen[str], needed: set[str]) -> tuple[str, set[str]]:
    """Ask the endpoint of a running job until it has all figures; return the page and what still lacks."""
    page, lacking, deadline = "", needed, time.monotonic() + 60
    while lacking and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                page = answer.read().decode()
        except urllib.error.URLError:
            time.sleep(0.1)
        lacking = {name for name in needed if f"\nmegatron_glue_{name}{{" not in page}
    return page, lacking


def test_a_running_job_serves_every_figure(corpus: str, tmp_path: Path) -> None:
    port = free_port()
    options = ["--use-packed-cache", "--double-buffer-ckpt", "--save", "run", "--save-interval", "2"]
    options += ["--metrics-port", str(port), "--peak-tflops", "0.1", "--train-iters", ENDLESS, "--name", "job"]
    process = start([*COMMAND, "--data-path", corpus, *options], tmp_path)
    try:
        page, lacking = scrape(port, process, {spec.name for spec in METRICS})
    finally:
        process.kill()
        process.wait()
    assert not lacking
    assert 'megatron_glue_expert_load_max{run="job",layer="1"}' in page
    values = {line.split("{")[0]: float(line.split()[-1]) for line in page.splitlines() if not line.startswith("#")}
    assert 0 < values["megatron_glue_mfu"] < 1
    assert values["megatron_glue_host_reads_per_step"] == 0
    assert values["megatron_glue_checkpoint_bytes_per_second"] > 0
    assert values["megatron_glue_straggler_ratio"] == 1


def test_a_resumed_run_adds_to_its_records(corpus: str, tmp_path: Path) -> None:
    for iterations in ("2", "4"):
        succeed([*COMMAND, "--data-path", corpus, "--save", "run", "--train-iters", iterations], tmp_path)
    found = records(tmp_path / "run" / "metrics.jsonl")
    assert [each["iteration"] for each in found if "loss" in each] == [1, 2, 3, 4]
    assert [each["iteration"] for each in found if "heldout_loss" in each] == [2, 4]
    assert sum(found[0]["expert_load"]["1"]) == pytest.approx(4, abs=0.01), "multiples of an even share"
    losses = json.loads((tmp_path / "run" / "summary.json").read_text())["losses"]
    assert [each["loss"] for each in found if "loss" in each] == losses
    assert all(each["packing_efficiency"] > 0.5 for each in found if "loss" in each)


def test_an_alarm_is_told_and_recorded(corpus: str, tmp_path: Path) -> None:
    options = ["--train-iters", "1", "--save", "run", "--expert-imbalance-alarm", "1.001"]
    outcome = succeed([*COMMAND, "--data-path", corpus, *options], tmp_path)
    assert "iteration 1: alarm: experts are out of balance in 2 layer(s)" in outcome.stdout
    first = records(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["expert_imbalance_alarm"] == 1
    assert len(first["alarms"]) == 1


def test_two_ranks_tell_what_they_exchange_and_who_is_slow(corpus: str, tmp_path: Path) -> None:
    options = ["--train-iters", "2", "--save", "run", "--expert-model-parallel-size", "2"]
    succeed([*COMMAND, "--data-path", corpus, *options], tmp_path, num_processes=2)
    last = [each for each in records(tmp_path / "run" / "metrics.jsonl") if "loss" in each][-1]
    assert last["collective_bytes_per_second"] > 0
    assert last["communication_ms"] > 0
    assert last["straggler_rank"] in (0, 1)
    assert last["straggler_ratio"] >= 1
    assert last["data_ms"] + last["compute_ms"] + last["communication_ms"] <= last["step_ms"] * 1.01


def test_a_port_in_use_ends_the_start_with_one_line(corpus: str, tmp_path: Path) -> None:
    with subprocess.Popen(["python3", "-m", "http.server", "--bind", "127.0.0.1", str(port := free_port())]) as other:
        try:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5).close()
                    break
                except urllib.error.URLError:
                    time.sleep(0.05)
            outcome = run([*COMMAND, "--data-path", corpus, "--save", "run", "--metrics-port", str(port)], tmp_path)
        finally:
            other.kill()
    assert outcome.code == 2
    assert len(outcome.error_lines) == 1
    assert f"--metrics-port={port}" in outcome.error_lines[0]


def test_offline_runs_of_wandb_keep_all_points_over_a_kill(corpus: str, tmp_path: Path) -> None:
    """The killed process had gone on behind its checkpoint: iterations that are made again are kept too."""
    pytest.importorskip("wandb", reason="pip install '.[wandb]'")
    options = [*COMMAND, "--data-path", corpus, "--save", "run", "--save-interval", "3", "--wandb-project", "p"]
    process = start([*options, "--train-iters", ENDLESS, "--eval-interval", "0"], tmp_path, WANDB_MODE="offline")
    try:
        path, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 60
        while not (path.exists() and path.read_text().count("\n") > 4):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    killed_at = records(path)[-1]["iteration"]
    assert json.loads((tmp_path / "run" / "wandb.json").read_text())["open_since"]
    last = killed_at + 2
    succeed([*options, "--train-iters", str(last), "--eval-interval", "0"], tmp_path, WANDB_MODE="offline")
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1, "one run over there"
    points = [_points(file) for file in files]
    iterations = [iteration for of_file in points for iteration, _ in of_file]
    # wandb's own process had not written all when the job was killed.
    assert set(iterations) == set(range(1, last + 1))
    assert "open_since" not in json.loads((tmp_path / "run" / "wandb.json").read_text())
    steps = [step for of_file in points for _, step in of_file]
    assert steps == sorted(set(steps)), "wandb drops what does not grow"


def _points(file: Path) -> list[tuple[int, int]]:
    """(iteration, wandb's own step) of each point of a training loss in an offline file."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in _log_records(file.read_bytes()):
        entry = wandb_internal_pb2.Record()
        entry.ParseFromString(data)
        if entry.WhichOneof("record_type") != "history":
            continue
        items = {(item.key or "/".join(item.nested_key)): item.value_json for item in entry.history.item}
        if "training/loss" in items:
            found.append((int(json.loads(items["iteration"])), int(json.loads(items["_step"]))))
    return found


def _log_records(content: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format behind wandb's header of 7 bytes; half of one is left out."""
    position, parts = 7, b""
    while position + 7 <= len(content):
        if (room := 2**15 - position % 2**15) < 7:
            position += room
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4) and position <= len(content):
            yield parts
            parts = b""
