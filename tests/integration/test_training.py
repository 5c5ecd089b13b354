"""The entry points as users run them: learn, save, stop, resume, get killed, resume; on one process and on two."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.support.cases import write_corpus
from tests.support.commands import run, start, succeed, summary

SMALL = [
    *("--num-layers", "3", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "64"),
    *("--global-batch-size", "4", "--heldout-fraction", "0.2", "--eval-iters", "1", "--eval-interval", "4"),
    *("--log-interval", "2", "--sample-tokens", "4", "--lr-warmup-iters", "2", "--keep-last", "3"),
    *("--hidden-dropout", "0.1", "--device", "cpu"),
]
MOE = ["pretrain_moe.py", *SMALL, "--num-experts", "4", "--moe-ffn-hidden-size", "16"]
ALL_ON = ["--use-packed-cache", "--double-buffer-ckpt"]
REQUIRED_KEYS = {
    *("losses", "heldout_loss", "unigram_entropy", "tokens_per_second", "packing_efficiency", "micro_batches"),
    *("metadata_builds", "metadata_reuses", "host_reads", "offloaded_bytes", "reload_wait_ms", "overlap_efficiency"),
    *("dropped_tokens", "peak_memory_bytes", "reload_steps"),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl"))


@pytest.fixture(scope="module")
def uninterrupted(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    command = [*MOE, *ALL_ON, "--data-path", corpus, "--train-iters", "12", "--save", "run", "--prove-isolation"]
    outcome = succeed([*command, "--save-interval", "4", "--summary-path", "s.json"], folder)
    assert "Summary of" in outcome.stdout
    assert outcome.stdout.startswith(
        "isolation proven: attention segments, window none, cp 1: changed 7 of 7 documents"
    )
    assert (outcome.stdout + outcome.stderr).count("optimizer fused") == 1
    assert "sample continuation" in outcome.stdout
    return summary(folder / "s.json")


def test_summary_of_a_run_with_everything_on(uninterrupted: dict[str, object]) -> None:
    assert uninterrupted.keys() >= REQUIRED_KEYS
    assert uninterrupted["micro_batches"] == 48
    assert uninterrupted["metadata_builds"] == 48, "one build per micro-batch"
    assert uninterrupted["metadata_built_ahead"] == 48, "beside the step before"
    kinds = uninterrupted["cache"]
    assert isinstance(kinds, dict)
    assert kinds["attention_metadata"]["misses"] == uninterrupted["metadata_builds"]
    assert kinds["rope_rows"]["misses"] == kinds["attention_metadata"]["misses"]
    assert kinds["rope_tables"]["evictions"] == 0
    assert uninterrupted["metadata_reuses"] == 48 * (2 * 3 - 1), "all other layers and all recomputes"
    assert uninterrupted["host_reads"] == 0
    assert uninterrupted["offloaded_bytes"] == 48 * (3 - 1) * 64 * 32 * 4, "the last block's input stays"
    assert uninterrupted["dropped_tokens"] == 0
    steps = uninterrupted["reload_steps"]
    assert isinstance(steps, list)
    assert [step.keys() >= {"copy_ms", "reload_wait_ms", "overlap_efficiency", "step_ms"} for step in steps] == [
        True
    ] * 12
    assert sum(step["copy_ms"] for step in steps) == pytest.approx(uninterrupted["reload_copy_ms"])
    losses = uninterrupted["losses"]
    assert isinstance(losses, list)
    assert len(losses) == 12
    assert losses[-1] < losses[0]


def test_optimisations_change_no_loss(corpus: str, uninterrupted: dict[str, object], tmp_path: Path) -> None:
    command = [*MOE, "--data-path", corpus, "--train-iters", "12", "--activation-offload", "--cache-tier", "host"]
    succeed([*command, "--summary-path", "s.json"], tmp_path)
    off = summary(tmp_path / "s.json")
    assert off["losses"] == uninterrupted["losses"]
    assert off["grad_norms"] == uninterrupted["grad_norms"]
    assert off["metadata_builds"] == 48 * 3 * 2
    assert off["host_reads"] > 0


def test_a_pipeline_trains_as_one_process_does(corpus: str, uninterrupted: dict[str, object], tmp_path: Path) -> None:
    command = [*MOE, *ALL_ON, "--data-path", corpus, "--train-iters", "12", "--exit-interval", "4", "--check-ranks"]
    outcome = succeed(
        [*command, "--pipeline-model-parallel-size", "2", "--save", "run", "--summary-path", "s.json"], tmp_path, 2
    )
    assert "pipeline: 1f1b, 2 stages on 2 ranks, layers 2 + 1, 4 micro-batches per step" in outcome.stdout
    assert "sample continuation" in outcome.stdout
    assert "--check-ranks: agreed 4 times on weights, in 4 steps on micro-batches" in outcome.stdout
    piped, losses = summary(tmp_path / "s.json"), uninterrupted["losses"]
    assert isinstance(losses, list)
    assert piped["losses"] == pytest.approx(losses[:4], rel=1e-5)
    assert piped["metadata_builds"] == piped["micro_batches"] == 16
    assert piped["host_reads"] == 0
    succeed([*command, "--pipeline-model-parallel-size", "2", "--save", "run", "--summary-path", "t.json"], tmp_path, 2)
    assert summary(tmp_path / "t.json")["losses"] == pytest.approx(losses[:8], rel=1e-4), "resumed"


def test_a_stopped_run_resumes_bit_for_bit(corpus: str, uninterrupted: dict[str, object], tmp_path: Path) -> None:
    command = [*MOE, *ALL_ON, "--data-path", corpus, "--train-iters", "12", "--save", "run", "--summary-path", "s.json"]
    succeed([*command, "--exit-interval", "5"], tmp_path)
    assert len(summary(tmp_path / "s.json")["losses"]) == 5
    succeed([*command, "--exit-interval", "9"], tmp_path)
    outcome = succeed(command, tmp_path)
    assert "resuming from run/step_00000009" in outcome.stdout
    resumed = summary(tmp_path / "s.json")
    for name in ("losses", "grad_norms", "heldout_loss"):
        assert resumed[name] == uninterrupted[name], name
    again = succeed(command, tmp_path)
    assert "finished" in again.stdout
    assert summary(tmp_path / "s.json") == resumed, "a finished run repeats its summary"
    (tmp_path / "run/summary.json").unlink()
    (tmp_path / "s.json").unlink()
    succeed(command, tmp_path)
    for name in ("losses", "grad_norms", "heldout_loss"):
        assert summary(tmp_path / "s.json")[name] == uninterrupted[name], (
            "killed before its summary, it makes up for it"
        )
    shard = next((tmp_path / "run/step_00000012").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    damaged = run(command, tmp_path)
    assert damaged.code == 1
    assert "damaged" in damaged.error_lines[0]


@pytest.mark.parametrize("num_processes", [0, 2])
def test_a_killed_run_resumes_bit_for_bit(
    num_processes: int, corpus: str, uninterrupted: dict[str, object], tmp_path: Path
) -> None:
    layout = ["--expert-model-parallel-size", "2"] if num_processes else []
    command = [*MOE, *ALL_ON, *layout, "--data-path", corpus, "--save", "run", "--summary-path", "s.json"]
    command += ["--train-iters", "12", "--save-interval", "3", "--global-batch-size", "4"]
    process = start(command, tmp_path, num_processes)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run/step_00000003").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode != 0
    outcome = succeed(command, tmp_path, num_processes)
    assert "resuming from" in outcome.stdout or "finished" in outcome.stdout
    killed = summary(tmp_path / "s.json")
    if num_processes == 0:
        assert killed["losses"] == uninterrupted["losses"]
    else:
        assert killed["losses"] == pytest.approx(uninterrupted["losses"], rel=1e-5)


def test_dense_model_learns_order_from_the_embedded_corpus(tmp_path: Path) -> None:
    command = ["pretrain_gpt.py", *SMALL, "--train-iters", "100", "--seq-length", "256", "--hidden-size", "64"]
    command += ["--heldout-fraction", "0.02", "--eval-iters", "8", "--eval-interval", "0", "--hidden-dropout", "0"]
    outcome = succeed([*command, "--lr", "2e-3", "--num-layers", "2", "--summary-path", "s.json"], tmp_path)
    result = summary(tmp_path / "s.json")
    assert result["heldout_loss"] < result["unigram_entropy"] - 0.2, "it must beat predicting by frequency"
    assert result["packing_efficiency"] >= 0.97
    assert result["expert_load"] is None
    assert "iteration 100/100" in outcome.stdout
    runs = list((tmp_path / "runs").iterdir())
    assert [path.name.rsplit("-", 2)[0] for path in runs] == ["pretrain_gpt"]
    assert (runs[0] / "step_00000100").is_dir()


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_processes_see_the_losses_of_one(
    engine: str, corpus: str, uninterrupted: dict[str, object], tmp_path: Path
) -> None:
    command = [*MOE, *ALL_ON, "--data-path", corpus, "--train-iters", "12", "--data-parallel-engine", engine]
    succeed([*command, "--summary-path", "s.json"], tmp_path, num_processes=2)
    assert summary(tmp_path / "s.json")["losses"] == pytest.approx(uninterrupted["losses"], rel=1e-4)


def test_a_checkpoint_of_another_model_is_refused(corpus: str, tmp_path: Path) -> None:
    command = [*MOE, "--data-path", corpus, "--save", "run"]
    succeed([*command, "--train-iters", "2"], tmp_path)
    outcome = run([*command, "--train-iters", "4", "--num-layers", "2"], tmp_path)
    assert outcome.code == 2
    assert len(outcome.error_lines) == 1
    assert "--num-layers" in outcome.error_lines[0]
    assert "Traceback" not in outcome.stderr
