"""Where a run starts from: its own folder, another one, an older checkpoint if allowed; and what it says about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import as_dict
from megatron_glue.config.sections import ModelConfig, MoEConfig, OptimizerConfig, RunConfig, TrainConfig
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.source import Source, changed_settings, find_source, load_source
from megatron_glue.training.checkpoint.state import LoadedCheckpoint
from tests.support.toy_run import Run


def saved_steps(root: Path, *steps: int) -> dict[int, dict[str, torch.Tensor]]:
    """A run with checkpoints of these steps, and the tensors of each."""
    run = Run(root)
    run.store._keep_last = 9
    tensors = {}
    for step in steps:
        run.train(step - run.iteration)
        run.save()
        tensors[step] = run.tensors()
    return tensors


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_own_folder_goes_first(tmp_path: Path) -> None:
    saved_steps(tmp_path / "own", 1, 2, 3)
    saved_steps(tmp_path / "other", 7)
    run = Run(tmp_path / "own")
    steps = ("step_00000003", "step_00000002", "step_00000001")
    expected = Source(tuple(tmp_path / "own" / name for name in steps), is_own=True)
    assert find_source(run.store, None) == expected
    assert find_source(run.store, str(tmp_path / "other")) == expected
    (tmp_path / "own/latest").write_text("step_00000002\n")
    assert find_source(run.store, None) == Source(expected.paths[1:], is_own=True)


def test_without_own_checkpoints_another_folder_or_step_is_read(tmp_path: Path) -> None:
    tensors = saved_steps(tmp_path / "other", 1, 2)
    run = Run(tmp_path / "own", seed=5)
    assert find_source(run.store, None) is None
    one = find_source(run.store, str(tmp_path / "other/step_00000001"))
    assert one == Source((tmp_path / "other/step_00000001",), is_own=False)
    source = find_source(run.store, str(tmp_path / "other"))
    assert source == Source(tuple(tmp_path / "other" / f"step_0000000{step}" for step in (2, 1)), is_own=False)
    start = load_source(run.store, source, run.state(), may_fall_back=False)
    assert start.loaded.step == 2
    assert start.notes == (
        f"new checkpoints go to {tmp_path / 'own'}; {tmp_path / 'other/step_00000002'} (--load) stays as it is",
    )
    assert all(torch.equal(tensor, tensors[2][name]) for name, tensor in run.tensors().items())
    assert run.store.save(2, run.state()), "what another run saved is not this run's checkpoint"


@pytest.mark.parametrize(("name", "reason"), [("missing", "is no folder"), ("empty", "holds no checkpoint")])
def test_a_folder_without_checkpoints_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    run = Run(tmp_path / "own")
    with pytest.raises(ConfigError, match=f"--load=.*{name}: {reason}; give a run's folder or one of its step_N"):
        find_source(run.store, str(tmp_path / name))


def test_damage_is_refused_with_the_file_and_the_way_out(tmp_path: Path) -> None:
    saved_steps(tmp_path, 1, 2)
    damage(tmp_path / "step_00000002/__0_0.distcp")
    run = Run(tmp_path, seed=5)
    source = find_source(run.store, None)
    with pytest.raises(CheckpointError, match=r"step_00000002/__0_0\.distcp: damaged.*; --load-fallback takes the new"):
        load_source(run.store, source, run.state(), may_fall_back=False)


@pytest.mark.parametrize("file", ["__0_0.distcp", "meta.json", "index.json", "manifest.json"])
def test_falling_back_takes_the_newest_good_one_and_says_so_in_one_line(tmp_path: Path, file: str) -> None:
    tensors = saved_steps(tmp_path, 1, 2, 3, 4)
    damage(tmp_path / f"step_00000004/{file}")
    (tmp_path / f"step_00000003/{file}").write_bytes(b"")
    run = Run(tmp_path, seed=5)
    start = load_source(run.store, find_source(run.store, None), run.state(), may_fall_back=True)
    assert (start.path, start.loaded.step) == (tmp_path / "step_00000002", 2)
    assert all(torch.equal(tensor, tensors[2][name]) for name, tensor in run.tensors().items())
    (note,) = start.warnings
    assert start.notes == ()
    assert note.startswith(f"warning: {tmp_path}/step_00000004, {tmp_path}/step_00000003 cannot be read (")
    assert f"step_00000004/{file}" in note
    assert note.endswith(f"; falling back to {tmp_path}/step_00000002")
    assert "\n" not in note
    # Going on from there, the damaged step is replaced when it is reached.
    run.iteration = start.loaded.step
    run.train(2)
    run.save()
    assert Run(tmp_path).store.load(tmp_path / "step_00000004", Run(tmp_path).state()).step == 4


def test_if_all_are_damaged_the_newest_is_named(tmp_path: Path) -> None:
    saved_steps(tmp_path, 1, 2)
    for step in (1, 2):
        damage(tmp_path / f"step_0000000{step}/__0_0.distcp")
    run = Run(tmp_path)
    with pytest.raises(CheckpointError, match=r"step_00000002/.*; none of the 1 checkpoints before it can be read"):
        load_source(run.store, find_source(run.store, None), run.state(), may_fall_back=True)


def test_another_model_is_no_damage(tmp_path: Path) -> None:
    saved_steps(tmp_path, 1, 2)
    run = Run(tmp_path, num_layers=3)
    with pytest.raises(ConfigError, match=r"step_00000002/meta\.json holds a model with --num-layers 2"):
        load_source(run.store, find_source(run.store, None), run.state(), may_fall_back=True)


def changes(before: RunConfig, now: RunConfig) -> list[str]:
    config = json.loads(json.dumps(as_dict(before)))
    return changed_settings(LoadedCheckpoint(1, {}, {}, config), now)


def test_f110_what_has_changed_is_named_with_both_values() -> None:
    before = RunConfig(optimizer=OptimizerConfig(lr=0.01), moe=MoEConfig(num_experts=4))
    now = RunConfig(
        optimizer=OptimizerConfig(lr=0.003, lr_decay_style="linear"),
        moe=MoEConfig(num_experts=4, moe_layer_freq=(0, 1, 0, 1)),
        model=ModelConfig(hidden_dropout=0.1),
        training=TrainConfig(train_iters=200, save="elsewhere", keep_last=7, eval_interval=3),
    )
    assert changes(before, now) == [
        "--hidden-dropout 0.0 -> 0.1",
        "--moe-layer-freq 1 -> 0 1 0 1",
        "--lr 0.01 -> 0.003",
        "--lr-decay-style cosine -> linear",
        "--train-iters 100 -> 200",
    ]
    assert changes(before, before) == []
    assert changes(now, now) == [], "lists of JSON are tuples here"


def test_a_setting_that_did_not_exist_then_had_its_default() -> None:
    config = as_dict(RunConfig())
    del config["optimizer"]["lr_decay_style"]
    del config["parallel"]
    loaded = LoadedCheckpoint(1, {}, {}, config)
    assert changed_settings(loaded, RunConfig()) == []
    present = RunConfig(optimizer=OptimizerConfig(lr_decay_style="WSD"))
    assert changed_settings(loaded, present) == ["--lr-decay-style cosine -> WSD"]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_a_fallback_found_damaged_neither_counts_nor_goes(tmp_path: Path) -> None:
    saved_steps(tmp_path, 2, 4, 6)
    damage(tmp_path / "step_00000006/__0_0.distcp")
    run = Run(tmp_path, seed=5)
    start = load_source(run.store, find_source(run.store, None), run.state(), may_fall_back=True)
    run.iteration = start.loaded.step
    run.store._keep_last = 2
    run.train(3)
    run.save()
    assert names(tmp_path) == ["latest", "step_00000004", "step_00000006", "step_00000007"]
    run.train(1)
    run.save()
    assert names(tmp_path) == ["latest", "step_00000006", "step_00000007", "step_00000008"]


def test_a_damaged_step_that_is_written_anew_counts_again(tmp_path: Path) -> None:
    saved_steps(tmp_path, 2, 4)
    damage(tmp_path / "step_00000004/__0_0.distcp")
    run = Run(tmp_path, seed=5)
    run.iteration = load_source(run.store, find_source(run.store, None), run.state(), may_fall_back=True).loaded.step
    run.store._keep_last = 1
    run.train(2)
    run.save()
    assert names(tmp_path) == ["latest", "step_00000004"]
    assert run.store.unreadable_steps == set()


def test_damage_in_another_run_s_folder_says_nothing_about_the_own(tmp_path: Path) -> None:
    saved_steps(tmp_path / "other", 1, 2)
    damage(tmp_path / "other/step_00000002/__0_0.distcp")
    run = Run(tmp_path / "own", seed=5)
    load_source(run.store, find_source(run.store, str(tmp_path / "other")), run.state(), may_fall_back=True)
    assert run.store.unreadable_steps == set()
