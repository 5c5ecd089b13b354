"""--dry-run prints a plan for any number of ranks, and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_glue.config.environment import LAUNCHER_NAMES
from megatron_glue.training.app import main
from megatron_glue.training.presets import MOE_DEFAULTS

LARGE = [
    *("--num-layers", "36", "--hidden-size", "4096", "--num-attention-heads", "32", "--num-query-groups", "8"),
    *("--num-experts", "128", "--moe-router-topk", "8", "--moe-ffn-hidden-size", "2304"),
    *("--tensor-model-parallel-size", "4", "--sequence-parallel", "--pipeline-model-parallel-size", "4"),
    *("--expert-model-parallel-size", "8", "--seq-length", "4096", "--global-batch-size", "1024"),
    *("--double-buffer-ckpt", "--device", "cuda", "--data-path", "nowhere.jsonl"),
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHER_NAMES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_256_gpus_are_planned_on_a_machine_without_one(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(MOE_DEFAULTS, [*LARGE, "--dry-run", "--world-size", "256"]) == 0
    out = capsys.readouterr().out
    for part in (
        "warning: --data-path=nowhere.jsonl: no such file on this machine",
        "ranks: 256 on 32 machine(s) of 8",
        "tensor 4, each layer's weights (tensor): ranks 0, 1, 2, 3 and so on, inside a machine",
        "ep 8, experts: ranks 0, 1, ... 7 and so on, inside a machine",
        "dp 16, data: ranks 0, 4, ... 60 and so on, across machines",
        "pipeline: 1f1b, 4 stages on 4 ranks, layers 9 + 9 + 9 + 9",
        "1024 packs of 4096 tokens, 64 micro-batch(es) of 1",
        "would start: 32 x torchrun --nnodes 32 --nproc-per-node 8",
        "optimisation double-buffered reload: on",
        "(command line)",
        "nothing was started",
    ):
        assert part in out
    table = [line.split() for line in out.splitlines() if line.startswith("      ")]
    assert [row[0] for row in table] == ["0", "1", "2", "3"]
    assert all(50 < float(row[-1]) < 80 for row in table)
    assert list(empty_folder.iterdir()) == []


def test_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a dry run starts nothing")

    monkeypatch.setattr("megatron_glue.training.app.distributed_session", refuse)
    monkeypatch.setattr("megatron_glue.training.app.build_session", refuse)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    assert main(MOE_DEFAULTS, ["--dry-run", "--save", "run"]) == 0
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--world-size", "100"], "WORLD_SIZE=100: is no multiple of"),
        (["--world-size", "256", "--global-batch-size", "1000"], "--global-batch-size=1000"),
        (["--world-size", "256", "--num-attention-heads", "30"], "--num-attention-heads=30"),
    ],
)
def test_a_plan_that_cannot_run_is_a_usage_error(
    flags: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(MOE_DEFAULTS, [*LARGE, "--dry-run", *flags]) == 2
    captured = capsys.readouterr()
    assert part in captured.err
    assert len(captured.err.splitlines()) == 1


def test_machines_of_another_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(MOE_DEFAULTS, [*LARGE, "--dry-run", "--world-size", "256", "--ranks-per-node", "4"]) == 0
    out = capsys.readouterr().out
    assert "ranks: 256 on 64 machine(s) of 4" in out
    assert "ep 8, experts: ranks 0, 1, ... 7 and so on, across machines" in out


def test_one_of_the_ranks_that_a_launcher_started_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        values = (str(rank), str(rank), "2", "2", "localhost", "1")
        for name, value in zip(LAUNCHER_NAMES, values, strict=True):
            monkeypatch.setenv(name, value)
        assert main(MOE_DEFAULTS, ["--dry-run"]) == 0
        assert ("ranks: 2 on 1 machine(s) of 2" in capsys.readouterr().out) == (rank == 0)
