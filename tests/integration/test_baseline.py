"""A baseline is recorded, holds the same code, refuses drift and refuses to compare what is not the same run."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_glue.layers import initialisation
from megatron_glue.proofs.baselines import read_record
from megatron_glue.proofs.packages import installed_packages
from tests.support.cases import write_corpus
from tests.support.commands import succeed
from tests.support.programs import load_program

TINY = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "64"),
    *("--num-experts", "4", "--moe-ffn-hidden-size", "16", "--heldout-fraction", "0.2", "--device", "cpu"),
]
LOOSE = ["--gate-throughput", "inf", "--gate-memory", "inf"]


def baseline(monkeypatch: pytest.MonkeyPatch, *words: Any) -> int:
    """Run the tool inside this process, which spares the start."""
    monkeypatch.setattr(sys, "argv", ["tools/baseline.py", *map(str, words)])
    return load_program("tools/baseline.py").main()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a job."""
    return [*TINY, "--data-path", str(write_corpus(tmp_path_factory.mktemp("data") / "corpus.jsonl"))]


@pytest.fixture(scope="module")
def recorded(job: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of the code as it is."""
    archive = tmp_path_factory.mktemp("archive")
    with pytest.MonkeyPatch.context() as patch:
        words = ["record", "--archive", archive, "--steps", 2, "--warmup", 1, "--", *job, "--use-packed-cache"]
        assert baseline(patch, *words) == 0
    (folder,) = archive.iterdir()
    return folder


@pytest.fixture
def copy(recorded: Path, tmp_path: Path) -> Path:
    """A copy of the record, for a test to change."""
    return Path(shutil.copytree(recorded, tmp_path / recorded.name))


def change(folder: Path, **values: Any) -> None:
    """Change a record's figures."""
    file = folder / "record.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_record_holds_what_the_way_back_needs(recorded: Path) -> None:
    record = read_record(recorded, "RECORD")
    assert record.name == recorded.name
    assert record.packages == installed_packages()
    assert record.environment["config"]["training"]["train_iters"] == 3
    switches = {entry["name"]: entry for entry in record.environment["optimisations"]}
    assert switches["packed-metadata cache"]["source"] == "command line"
    assert "train_iters: 100" in record.config_yaml, "the job's own, not that of the short run"
    assert len(record.observed["losses"]) == 3
    assert len(record.observed["step_ms"]) == 2
    assert len((recorded / "losses.csv").read_text().splitlines()) == 4


def test_the_same_code_passes_bit_for_bit(
    recorded: Path, job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = ["--gate-loss", 0, "--gate-output", 0, *LOOSE]
    assert baseline(monkeypatch, "compare", "--against", recorded, *exact, "--json", tmp_path / "c.json") == 0
    result = json.loads((tmp_path / "c.json").read_text())
    assert result["passed"]
    assert result["versions"] == result["packages"] == result["settings"] == []
    assert "no drift" in capsys.readouterr().out
    # Data that moved is the same data; a switch that is off is a change that is told.
    moved = shutil.copy(job[-1], tmp_path / "moved.jsonl")
    assert baseline(monkeypatch, "compare", "--against", recorded, *LOOSE, "--", *job[:-1], moved) == 0
    assert "enable_metadata_cache True -> False" in capsys.readouterr().out


def test_everything_off_by_one_switch_is_held_against_the_record(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRON_GLUE_DISABLE", "1")
    assert baseline(monkeypatch, "compare", "--against", recorded, *LOOSE) == 0
    said = capsys.readouterr().out
    assert "enable_grouped_index True -> False, enable_metadata_cache True -> False" in said


def test_a_version_that_computes_otherwise_is_refused(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = initialisation._draw
    monkeypatch.setattr(initialisation, "_draw", lambda shape, std, seed: draw(shape, 1.01 * std, seed))
    assert baseline(monkeypatch, "compare", "--against", recorded, *LOOSE) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    for name in ("training loss", "gradient norm", "held-out loss", "layer 0, before training"):
        assert any(name in line for line in failed), name


@pytest.mark.parametrize(
    ("key", "name"),
    [("losses", "training loss, step 1"), ("heldout", "held-out loss"), ("grad_norms", "gradient norm")],
)
def test_drift_is_refused(
    key: str, name: str, recorded: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *rest = json.loads((copy / "record.json").read_text())[key]
    change(copy, **{key: [first * (1 + 1e-4), *rest]})
    assert baseline(monkeypatch, "compare", recorded, copy) == 1
    said = capsys.readouterr().out
    failed = [line for line in said.splitlines() if "FAILED" in line]
    assert len(failed) == 1
    assert name in failed[0]
    assert "REFUSED: 1 of" in said
    assert baseline(monkeypatch, "compare", recorded, copy, "--gate-loss", 1e-3) == 0


def test_a_slow_version_is_refused_on_the_same_kind_of_machine(
    recorded: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = json.loads((recorded / "record.json").read_text())
    slower = {"tokens_per_second": before["tokens_per_second"] * 0.8, "step_ms": [10.0, 10.0]}
    change(copy, **slower)
    fast = Path(shutil.copytree(recorded, copy.with_name("fast")))
    change(fast, step_ms=[8.0, 8.0])
    assert baseline(monkeypatch, "compare", fast, copy) == 1
    assert baseline(monkeypatch, "compare", fast, copy, "--performance", "report") == 0
    change(copy, machine={**before["machine"], "processor": "another"})
    capsys.readouterr()
    assert baseline(monkeypatch, "compare", fast, copy) == 0
    assert "not judged: another kind of machine, processor is another" in capsys.readouterr().out
    assert baseline(monkeypatch, "compare", fast, copy, "--performance", "refuse") == 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--seed", "7"], "training.seed=7: the baseline was made with training.seed="),
        (["--lr", "0.5"], "optimizer.lr=0.5: the baseline was made with optimizer.lr="),
        (["--max-documents", "20"], "data.max_documents=20"),
    ],
)
def test_another_run_is_refused_before_it_trains(
    flags: list[str],
    reason: str,
    recorded: Path,
    job: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(load_program("tools/baseline.py"), "observe_run", lambda *_: pytest.fail("it trained"))
    assert baseline(monkeypatch, "compare", "--against", recorded, "--", *job, *flags) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert reason in line


def test_other_data_under_the_same_name_is_refused(
    recorded: Path, job: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = Path(job[-1])
    text = corpus.read_text()
    try:
        corpus.write_text(text + '{"text": "one more"}\n')
        assert baseline(monkeypatch, "compare", "--against", recorded) == 2
    finally:
        corpus.write_text(text)
    assert "data.content=" in capsys.readouterr().err


def test_ranks_record_together_and_other_ranks_are_refused(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tools/baseline.py", "record", "--archive", "archive", "--steps", "2", "--", *job]
    succeed([*words, "--expert-model-parallel-size", "2"], tmp_path, num_processes=2)
    (folder,) = (tmp_path / "archive").iterdir()
    record = read_record(folder, "RECORD")
    assert record.observed["run"]["ranks"] == record.environment["ranks"] == 2
    assert baseline(monkeypatch, "compare", "--against", folder, "--", *job) == 2
    assert "parallel.expert_model_parallel_size=1" in capsys.readouterr().err
    change(folder, run={**record.observed["run"], "parallel.expert_model_parallel_size": 1})
    assert baseline(monkeypatch, "compare", "--against", folder, "--", *job) == 2
    assert "ranks=1: the baseline was made with ranks=2" in capsys.readouterr().err


def test_a_record_of_the_same_code_is_kept(
    recorded: Path, job: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_program("tools/baseline.py"), "observe_run", lambda *_: pytest.fail("it trained"))
    assert baseline(monkeypatch, "record", "--archive", recorded.parent, "--", *job) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_run_that_is_not_finite_makes_no_record(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--steps", 3, "--warmup", 0, "--", *job, "--lr", "1e30", "--min-lr", "0", "--lr-warmup-iters", "0"]
    assert baseline(monkeypatch, "record", "--archive", tmp_path / "archive", *words) == 1
    assert "nothing was recorded" in capsys.readouterr().err
    assert not list((tmp_path / "archive").iterdir())


def test_the_archive_is_listed(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baseline(monkeypatch, "list", recorded.parent, "--json", tmp_path / "l.json") == 0
    assert recorded.name[:20] in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "l.json").read_text())["records"]
    assert row["name"] == recorded.name
    assert baseline(monkeypatch, "list", tmp_path) == 2


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["record", "--archive", "a", "--steps", "0"], "--steps=0: too few steps; use at least 1"),
        (["compare", "a"], "RECORD=a: needs two records, or one with --against; name the baseline first"),
        (["compare", "a", "--against", "b"], "RECORD=a: needs two records, or one with --against"),
        (["compare", "a", "b", "--gate-loss", "nan"], "--gate-loss=nan: is not a number from 0 on"),
        (
            ["compare", "a", "b", "--", "--lr", "1"],
            "--=--lr 1: compare of what is there runs nothing",
        ),
        (["compare", "nowhere", "b"], "RECORD=nowhere/record.json: cannot be read"),
    ],
)
def test_wrong_use_is_one_line(
    words: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baseline(monkeypatch, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {complaint}")
