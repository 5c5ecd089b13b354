"""Checkpoints in DeepSpeed's own format become ours, with every weight, moment and counter, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from megatron_glue.config.errors import ConfigError
from megatron_glue.parallel.agreement import PeerFailedError
from megatron_glue.parallel.gather import gather_full_parameters
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.checkpoint import deepspeed as checkpoint_deepspeed
from megatron_glue.training.checkpoint.deepspeed import convert_deepspeed, native_step
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.store import CheckpointStore
from megatron_glue.training.session import build_session
from megatron_glue.training.step import train_step
from tests.support.cases import small_config, write_corpus
from tests.support.deepspeed_runs import ToyRun, needs_deepspeed
from tests.support.processes import run_distributed
from tools.checkpoint import main

pytestmark = needs_deepspeed

# world, stage, ep, bf16
CASES = {
    "stage0": (2, 0, 1, False),
    "stage1": (2, 1, 1, False),
    "stage1-ep2-bf16": (4, 1, 2, True),
    "stage2-ep2": (4, 2, 2, False),
    "stage3": (3, 3, 1, False),
    "stage3-bf16": (2, 3, 1, True),
}


def save_native(
    rank: int, world_size: int, root: str, stage: int, ep_size: int, bf16: bool, num_steps: int = 2
) -> dict[str, torch.Tensor]:
    run = ToyRun("deepspeed", stage, ep_size, bf16=bf16, has_experts=stage != 3)
    # Six micro-batches divide by two and by three.
    step = [[0, 1, 2, 3, 4], [5, 6, 1], [], [2, 2, 2, 2], [3, 4, 5, 6, 1, 2], [6]]
    run.train(num_steps, step if world_size == 3 else [*step, [4, 4], [1, 2, 3]])
    run.engine.module.save_checkpoint(root, tag=f"global_step{num_steps}")
    return run.tensors()


@pytest.mark.parametrize("case", CASES)
def test_weights_moments_and_counters_arrive_bit_for_bit(tmp_path: Path, case: str) -> None:
    world_size, stage, ep_size, bf16 = CASES[case]
    native = tmp_path / "native"
    saved = run_distributed(save_native, world_size, str(native), stage, ep_size, bf16)[0]
    one = ToyRun(has_experts=stage != 3)
    assert native_step(native) == 2
    convert_deepspeed(native, tmp_path / "ours", one.state(), num_shards=2)
    one.scramble()
    loaded = one.store(tmp_path).load(tmp_path / "ours", one.state())
    assert loaded.step == 2
    found = one.tensors()
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(found[name], tensor), name


def test_files_name_no_class_without_a_stand_in(tmp_path: Path) -> None:
    run_distributed(save_native, 2, str(tmp_path), 2, 1, False)
    named = {name for file in tmp_path.glob("*/*.pt") for name in get_unsafe_globals_in_checkpoint(file)}
    assert named <= {name for _, name in checkpoint_deepspeed._STAND_INS}


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    run_distributed(save_native, 2, str(folder), 1, 1, False)
    return folder


def change(path: Path, edit: Any) -> None:
    """Rewrite one of DeepSpeed's files."""
    with torch.serialization.safe_globals(checkpoint_deepspeed._STAND_INS):
        content = torch.load(path, weights_only=True)
    edit(content)
    torch.save(content, path)


def rename_parameter(content: dict[str, Any]) -> None:
    for places in content["optimizer_state_dict"]["param_slice_mappings"]:
        if "blocks.0.managed.experts.up" in places:
            places["blocks.0.managed.experts.upp"] = places.pop("blocks.0.managed.experts.up")


def test_f107_a_renamed_expert_is_a_failure(tmp_path: Path, native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(native, copy)
    # What is written back carries the stand-ins' own names.
    own = [*checkpoint_deepspeed._STAND_INS, *(cls for cls, _ in checkpoint_deepspeed._STAND_INS)]
    monkeypatch.setattr(checkpoint_deepspeed, "_STAND_INS", own)
    for file in copy.glob("*/zero_pp_rank_*_optim_states.pt"):
        change(file, rename_parameter)
    with pytest.raises(CheckpointError) as error:
        convert_deepspeed(copy, tmp_path / "ours", ToyRun().state())
    assert "lacks 4 tensors: model.blocks.0.experts.up, optimizer.blocks.0.experts.up.exp_avg" in str(error.value)
    assert not (tmp_path / "ours").exists()


def test_a_tensor_that_the_model_has_not_is_a_failure(tmp_path: Path, native: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has, and this model has not, 16 tensors: model.blocks.0.experts"):
        convert_deepspeed(native, tmp_path / "ours", ToyRun(has_experts=False).state())


def test_missing_and_damaged_files_are_named(tmp_path: Path, native: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(native, copy)
    state = ToyRun().state()
    victim = copy / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    victim.write_bytes(victim.read_bytes()[:-600])
    with pytest.raises(CheckpointError, match=f"{victim}: damaged"):
        convert_deepspeed(copy, tmp_path / "ours", state)
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"{victim}: No such file"):
        convert_deepspeed(copy, tmp_path / "ours", state)
    with pytest.raises(CheckpointError, match="it is no DeepSpeed checkpoint"):
        convert_deepspeed(tmp_path, tmp_path / "ours", state)
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        convert_deepspeed(native, tmp_path / "there", state)


def test_a_checkpoint_without_a_step_has_no_moments(tmp_path: Path) -> None:
    run_distributed(save_native, 2, str(tmp_path / "native"), 1, 1, False, 0)
    with pytest.raises(CheckpointError, match="no optimizer step was made"):
        convert_deepspeed(tmp_path / "native", tmp_path / "ours", ToyRun().state())


def test_experts_that_deepspeed_did_not_save_are_missed(tmp_path: Path) -> None:
    """In stage 0 it drops parameters of experts that are not its own; nothing can bring them back."""
    run_distributed(save_native, 2, str(tmp_path / "native"), 0, 2, False)
    with pytest.raises(CheckpointError):
        convert_deepspeed(tmp_path / "native", tmp_path / "ours", ToyRun().state())


def refuse_counters_on_one_rank(rank: int, world_size: int) -> list[str]:
    run = ToyRun("deepspeed", 1)
    for name, _, state in run.optimizer.named_state():
        state["step"].fill_(5.0 if rank == 1 and name == "embedding" else 6.0)
    with pytest.raises(ValueError if rank == 1 else PeerFailedError) as error:
        run.engine.after_load()
    return [str(error.value)]


def test_counters_that_one_rank_refuses_are_refused_by_all() -> None:
    """The others must not wait for it in the collective that brings weights up to date."""
    answers = run_distributed(refuse_counters_on_one_rank, 2)
    assert answers[0] == answers[1]
    assert "others of its group" in answers[0][0]


def train_natively(rank: int, world_size: int, corpus: str, root: str) -> dict[str, Any]:
    """Two steps of a real model, saved by DeepSpeed, and the third."""
    parallel = {"data_parallel_engine": "deepspeed", "zero_stage": 2}
    config = small_config(corpus, parallel=parallel, moe={"num_experts": 0})
    mesh = ParallelMesh.build(config.parallel, "cpu")
    session = build_session(config, mesh, torch.device("cpu"), None)
    for _ in range(2):
        train_step(session)
    session.engine.module.save_checkpoint(root)
    position = session.data.loader.state_dict()
    train_step(session)
    session.close()
    return {"weights": gather_full_parameters(session.engine.module, mesh), "pack": position["num_packs_taken"]}


def test_the_tool_converts_a_real_run_that_then_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = str(write_corpus(tmp_path / "corpus.jsonl"))
    config = small_config(corpus, moe={"num_experts": 0})
    straight = run_distributed(train_natively, 2, corpus, str(tmp_path / "native"))[0]
    flags = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--num-query-groups", "2"]
    flags += ["--data-path", corpus, "--seq-length", "128", "--heldout-fraction", "0.2", "--packing-window", "16"]
    flags += ["--lr", "0.01", "--min-lr", "0.001", "--lr-warmup-iters", "2", "--global-batch-size", "4"]
    command = ["convert-deepspeed", str(tmp_path / "native"), str(tmp_path / "ours")]
    assert main([*command, "--", "pretrain_gpt.py", *flags, "--train-iters", "6", "--eval-iters", "1"]) == 0
    assert "step 2" in capsys.readouterr().out

    session = build_session(config, ParallelMesh(), torch.device("cpu"), None)
    loaded = CheckpointStore(tmp_path, 2, ParallelMesh()).load(tmp_path / "ours", session.training_state())
    session.adopt(loaded)
    assert session.iteration == 2
    assert session.data.loader.position.num_packs_taken == straight["pack"] == 8
    train_step(session)
    session.close()
    for name, tensor in gather_full_parameters(session.engine.module, ParallelMesh()).items():
        assert torch.allclose(tensor, straight["weights"][name], rtol=1e-4, atol=1e-6), name

    assert main([*command, "--", "pretrain_gpt.py", *flags]) == 2
    assert "exists already" in capsys.readouterr().err
    command[-1] = str(tmp_path / "other")
    assert main([*command, "--", "pretrain_gpt.py", *flags, "--num-layers", "3"]) == 1
    assert "lacks" in capsys.readouterr().err
    assert main(command) == 2
    assert "pretrain_gpt.py or pretrain_moe.py" in capsys.readouterr().err
