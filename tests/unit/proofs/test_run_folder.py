"""A run's folder is read whatever state the run is in, and what is missing is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.proofs.run_folder import read_run
from tests.support.run_folders import summary_of, write_saved_step


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    losses = [5.0, 4.0, 3.0]
    write_saved_step(tmp_path, 2, losses[:2])
    write_saved_step(tmp_path, 3, losses)
    (tmp_path / "summary.json").write_text(json.dumps(summary_of(losses, step_tokens=[90, 100, 110])))
    (tmp_path / "env.json").write_text('{"git": {"revision": "abc"}}')
    record = read_run(tmp_path)
    assert (record.name, record.iteration) == ("pretrain_moe", 3)
    assert record.series["loss"] == {1: 5.0, 2: 4.0, 3: 3.0}
    assert record.series["tokens_per_second"] == {2: 500.0, 3: 550.0}, "without the first step, which warms up"
    assert list(record.series["lr"]) == [1, 2, 3]
    assert record.series["lr"][1] == pytest.approx(1e-4)
    assert record.versions == {"megatron_glue": "9.8.7", "torch": "2.99"}
    assert record.provenance == {"num_layers": "command line"}
    assert [saved.step for saved in record.saved] == [2, 3]
    assert record.saved[0].num_bytes > 100
    assert record.environment == {"git": {"revision": "abc"}}
    assert record.expert_shares == [[0.5, 1.5, 0.0, 2.0], [1.0] * 4]


def test_a_killed_run_is_known_from_its_newest_checkpoint(tmp_path: Path) -> None:
    write_saved_step(tmp_path, 2, [5.0, 4.0])
    record = read_run(tmp_path)
    assert record.series["loss"] == {1: 5.0, 2: 4.0}
    assert record.iteration == 2
    assert "summary.json is not there, the run has not ended" in record.notes


def test_the_log_wins_and_its_last_half_line_is_no_record(tmp_path: Path) -> None:
    write_saved_step(tmp_path, 2, [5.0, 4.0])
    lines = [
        {"iteration": 2, "loss": 4.5, "lr": 0.5, "memory": {"allocated_bytes": 7}},
        {"iteration": 4, "loss": 3.0, "lr": 0.2, "time": 1e9, "name": "x", "ok": True},
        {"iteration": 2, "loss": 4.25, "lr": 0.4},
    ]
    text = "\n".join(map(json.dumps, lines)) + '\n{"iteration": 5, "lo'
    (tmp_path / "metrics.jsonl").write_text(text)
    record = read_run(tmp_path)
    assert record.series["loss"] == {1: 5.0, 2: 4.25, 4: 3.0}, "the later of two records of an iteration counts"
    assert record.series["lr"] == {2: 0.4, 4: 0.2}
    assert record.series["memory.allocated_bytes"] == {2: 7.0}
    assert not {"time", "name", "ok"} & record.series.keys()
    assert record.iteration == 4
    assert "1 lines of metrics*.jsonl are no records" in record.notes


def test_a_run_that_goes_on_is_known_from_its_start_and_its_records(tmp_path: Path) -> None:
    start = {
        "config": {"training": {"train_iters": 9}},
        "provenance": {"lr": "command line"},
        "software": {"torch": "3"},
    }
    (tmp_path / "env.json").write_text(json.dumps(start))
    lines = [
        {"iteration": 1, "expert_load": {"10": [0.5, 1.5], "9": [1.0, 1.0]}, "alarms": ["dead expert"]},
        {
            "iteration": 2,
            "expert_load": {"10": [0.0, 2.0], "9": [0.75, 1.25]},
            "expert_load_max": {"9": 1.25, "10": 2.0},
        },
        {"iteration": 3, "heldout_loss": 2.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    record = read_run(tmp_path)
    assert record.expert_shares == [[0.75, 1.25], [0.0, 2.0]], "of the newest record that has them, layers in order"
    assert record.alarms == [(1, "dead expert")]
    assert record.series["expert_load_max.10"] == {2: 2.0}
    assert record.config == start["config"]
    assert record.provenance == start["provenance"]


def test_reloads_of_a_resumed_run_stand_at_their_iterations(tmp_path: Path) -> None:
    steps = [{"copy_ms": 2.0, "reload_wait_ms": 0.5}] * 2
    content = summary_of([5.0, 4.0, 3.0], step_times_s=[0.2, 0.1], reload_steps=steps)
    (tmp_path / "summary.json").write_text(json.dumps(content))
    record = read_run(tmp_path)
    assert record.series["copy_ms"] == {2: 2.0, 3: 2.0}
    assert record.series["step_ms"] == {2: 200.0, 3: 100.0}
    assert record.series["tokens_per_second"] == {3: 1000.0}


def test_damage_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    write_saved_step(tmp_path, 2, [5.0, 4.0])
    (write_saved_step(tmp_path, 3, [5.0, 4.0, 3.0]) / "meta.json").write_text("{")
    (tmp_path / "summary.json").write_text("[1]")
    (tmp_path / "env.json").write_bytes(b"\xff")
    record = read_run(tmp_path)
    assert record.iteration == 3
    assert "damaged, not JSON" in record.saved[1].damage
    assert record.series["loss"] == {1: 5.0, 2: 4.0}
    assert "summary.json holds no mapping" in record.notes
    assert any(note.startswith("env.json cannot be read") for note in record.notes)


@pytest.mark.parametrize(("name", "reason"), [("none", "is no folder"), (".", "holds no checkpoint, summary.json")])
def test_what_is_no_run_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_run(tmp_path / name)
