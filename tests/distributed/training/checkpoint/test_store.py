"""Checkpoints across layouts and engines: what one wrote, another reads, weights and moments, bit for bit."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import OptimizerConfig, ParallelConfig, RunConfig
from megatron_glue.parallel.collectives import all_reduce_sum
from megatron_glue.parallel.data_parallel import wrap_data_parallel
from megatron_glue.parallel.engines.deepspeed import DeepSpeedEngine
from megatron_glue.parallel.gather import gather_full_parameters
from megatron_glue.parallel.grad_norm import global_grad_norm
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.precision import Precision
from megatron_glue.training.checkpoint import files, sharing
from megatron_glue.training.checkpoint import index as checkpoint_index
from megatron_glue.training.checkpoint import state as checkpoint_state
from megatron_glue.training.checkpoint import tensors as checkpoint_tensors
from megatron_glue.training.checkpoint.store import CheckpointError, CheckpointStore, TrainingState
from megatron_glue.training.optimizer import build_optimizer
from tests.support.processes import run_distributed
from tests.support.tolerances import assert_close
from tests.support.toy_moe import ToyModel, run_step

CPU = torch.device("cpu")
LAYOUTS = {
    "ddp-dp2": (2, "ddp", 1),
    "ddp-ep2": (2, "ddp", 2),
    "fsdp2-dp2": (2, "fsdp2", 1),
    "fsdp2-ep2xdp2": (4, "fsdp2", 2),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
ONE_PROCESS = ("ddp", 1)


class Run:
    """The toy MoE under one engine and layout."""

    def __init__(self, root: str | Path, engine_name: str, ep_size: int) -> None:
        parallel = ParallelConfig(data_parallel_engine=engine_name, expert_model_parallel_size=ep_size)
        self.mesh = ParallelMesh.build(parallel, "cpu")
        precision = Precision(torch.float32)
        self.engine = wrap_data_parallel(ToyModel(self.mesh), self.mesh, parallel, precision)
        self.optimizer = build_optimizer(self.engine.module.named_parameters(), OptimizerConfig(), "fused", CPU)
        self.store = CheckpointStore(root, 2, self.mesh)

    def state(self) -> TrainingState:
        return TrainingState(self.engine.module, self.optimizer, RunConfig(), {"iteration": 2}, {"pack": 16})

    def train(self, num_steps: int, *, poisoned_rank: int | None = None) -> None:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            run_step(self.engine, self.mesh)
            if self.mesh.rank == poisoned_rank:
                self.engine.gradient_parameters()[0].grad.fill_(float("nan"))
            self.optimizer.step(0.01, global_grad_norm(self.engine.gradient_parameters(), self.mesh))

    def scramble(self) -> None:
        """Make sure that what is right afterwards was read."""
        with torch.no_grad():
            for _, param, state in self.optimizer.named_state():
                for tensor in (param, *state.values()):
                    tensor.fill_(-3.0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Whole weights, moments and counters on every rank, gathered without the code under test."""
        found = dict(gather_full_parameters(self.engine.module, self.mesh))
        saved = [param.detach().clone() for _, param, _ in self.optimizer.named_state()]
        with torch.no_grad():
            for key in ("exp_avg", "exp_avg_sq"):
                for _, param, state in self.optimizer.named_state():
                    param.copy_(state[key])
                moments = gather_full_parameters(self.engine.module, self.mesh)
                found |= {f"{name}/{key}": tensor.clone() for name, tensor in moments.items()}
            for (_, param, _), tensor in zip(self.optimizer.named_state(), saved, strict=True):
                param.copy_(tensor)
        found |= {f"{name}/step": state["step"].clone() for name, _, state in self.optimizer.named_state()}
        return {name: tensor.clone() for name, tensor in found.items()}


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def train_and_save(rank: int, world_size: int, root: str, engine_name: str, ep_size: int) -> dict[str, torch.Tensor]:
    run = Run(root, engine_name, ep_size)
    run.train(2)
    run.store.save(2, run.state())
    return run.tensors()


@layouts
def test_f103_f104_saved_by_many_read_by_one(tmp_path: Path, layout: str) -> None:
    world_size, engine_name, ep_size = LAYOUTS[layout]
    saved = run_distributed(train_and_save, world_size, str(tmp_path), engine_name, ep_size)[0]
    one = Run(tmp_path, *ONE_PROCESS)
    one.train(2)
    expected = one.tensors()
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(saved[name], tensor, what=name, tolerance=1e-4)

    one.scramble()
    loaded = one.store.load(one.store.find_latest(), one.state())
    assert (loaded.step, loaded.counters, loaded.data_position) == (2, {"iteration": 2}, {"pack": 16})
    assert_equal(one.tensors(), saved)


def load_and_go_on(
    rank: int, world_size: int, root: str, engine_name: str, ep_size: int
) -> list[dict[str, torch.Tensor]]:
    run = Run(root, engine_name, ep_size)
    run.scramble()
    run.store.load(run.store.find_latest(), run.state())
    loaded = run.tensors()
    run.train(1)
    return [loaded, run.tensors()]


@layouts
def test_f104_saved_by_one_read_by_many(tmp_path: Path, layout: str) -> None:
    world_size, engine_name, ep_size = LAYOUTS[layout]
    one = Run(tmp_path, *ONE_PROCESS)
    one.train(2)
    one.store.save(2, one.state())
    saved = one.tensors()
    one.train(1)
    for loaded, continued in run_distributed(load_and_go_on, world_size, str(tmp_path), engine_name, ep_size):
        assert_equal(loaded, saved)
        for name, tensor in one.tensors().items():
            assert_close(continued[name], tensor, what=name, tolerance=1e-4)


def change_layout(rank: int, world_size: int, root: str) -> None:
    first = Run(root, "ddp", 2)
    first.train(2)
    first.store.save(2, first.state())
    path = first.store.path_of(2)
    for engine_name, ep_size in (("fsdp2", 2), ("fsdp2", 1), ("ddp", 1)):
        other = Run(root, engine_name, ep_size)
        other.scramble()
        other.store.load(path, other.state())
        assert_equal(other.tensors(), first.tensors())


def test_f104_layout_and_engine_change_on_the_same_ranks(tmp_path: Path) -> None:
    run_distributed(change_layout, 2, str(tmp_path))


def test_each_logical_slice_is_saved_once(tmp_path: Path) -> None:
    run_distributed(train_and_save, 2, str(tmp_path), "ddp", 2)
    path = tmp_path / "step_00000002"
    tensors = json.loads((path / "index.json").read_bytes())["tensors"]
    slices = {name: [part["sizes"] for part in entry["slices"]] for name, entry in tensors.items()}
    assert slices["model.embedding"] == [[7, 6]]
    assert slices["model.blocks.0.experts.up"] == slices["optimizer.blocks.0.experts.up.exp_avg"] == [[2, 6, 4]] * 2
    assert {"rng.cpu.00000", "rng.cpu.00001"} <= slices.keys()
    # Replicated tensors are spread over the ranks' files.
    files = {part["file"] for entry in tensors.values() for part in entry["slices"]}
    assert files == {"__0_0.distcp", "__1_0.distcp"}


def save_again_and_again(rank: int, world_size: int, root: str) -> list[int]:
    real, num_exchanges = sharing.gather_rows, []
    sharing.gather_rows = lambda *args: (num_exchanges.append(1), real(*args))[1]
    run = Run(root, "ddp", 1)
    told = []
    for step in range(1, 4):
        run.train(1)
        run.store.save(step, run.state())
        told.append(len(num_exchanges))
    if rank == 1:
        # Only there: the first rank has to ask again because another has changed.
        run.engine.model.register_buffer("extra", torch.zeros(3))
    run.store.save(4, run.state())
    return [*told, len(num_exchanges)]


def test_who_writes_what_is_asked_again_only_when_a_rank_has_changed(tmp_path: Path) -> None:
    assert run_distributed(save_again_and_again, 2, str(tmp_path)) == [[1, 1, 1, 2]] * 2
    first, last = (json.loads((tmp_path / f"step_0000000{step}/index.json").read_bytes()) for step in (3, 4))
    assert last["tensors"].keys() - first["tensors"].keys() == {"model.extra"}


def fail_on_one_rank(rank: int, world_size: int, root: str, failing_rank: int) -> list[str]:
    run = Run(root, "ddp", 2)
    run.train(1)
    run.store.save(1, run.state())
    before = run.tensors()
    run.train(1)
    real = checkpoint_tensors.write_parts

    def full(path: Path, _parts: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    if rank == failing_rank:
        checkpoint_tensors.write_parts = full
    with pytest.raises(CheckpointError) as caught:
        run.store.save(2, run.state())
    checkpoint_tensors.write_parts = real
    assert [entry.name for entry in sorted(Path(root).iterdir())] == ["latest", "step_00000001"]
    run.scramble()
    run.store.load(run.store.find_latest(), run.state())
    assert_equal(run.tensors(), before)
    run.store.save(2, run.state())
    return [str(caught.value)]


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_full_disk_on_one_rank_stops_all_alike(tmp_path: Path, failing_rank: int) -> None:
    answers = run_distributed(fail_on_one_rank, 2, str(tmp_path), failing_rank)
    assert answers[0] == answers[1]
    line = answers[0][0]
    assert f"__{failing_rank}_0.distcp: No space left on device" in line
    assert "step 2 was not saved, earlier checkpoints are untouched" in line
    assert "\n" not in line


def fail_unexpectedly(rank: int, world_size: int, root: str, station: str) -> list[str]:
    run = Run(root, "ddp", 2)
    run.train(1)
    run.store.save(1, run.state())
    module = checkpoint_tensors if station == "write_parts" else checkpoint_state
    real = getattr(module, station)

    def fail(*_args) -> None:
        raise ValueError("broken")

    told = []
    for work in (
        lambda: run.store.save(2, run.state()),
        lambda: run.store.load(Path(root) / "step_00000001", run.state()),
    ):
        if rank == 1:
            setattr(module, station, fail)
        try:
            work()
        except CheckpointError as error:
            told.append(str(error))
        finally:
            setattr(module, station, real)
    run.store.save(2, run.state())
    return told


@pytest.mark.parametrize(("station", "num_failures"), [("collect_tensors", 2), ("rng_tensors", 2), ("write_parts", 1)])
def test_an_unexpected_error_on_one_rank_stops_all_alike(tmp_path: Path, station: str, num_failures: int) -> None:
    """Before one rank's part of a collective above all: the others would wait in it."""
    answers = run_distributed(fail_unexpectedly, 2, str(tmp_path), station)
    assert answers[0] == answers[1]
    assert len(answers[0]) == num_failures
    assert all("ValueError: broken" in line for line in answers[0])


def load_and_fail_after(rank: int, world_size: int, root: str, where: str) -> list[str]:
    """The DeepSpeed engine's part after reading, around stand-ins: counters, a collective, and what comes behind it."""
    run = Run(root, "ddp", 1)
    run.store.save(1, run.state())

    def fail(at: str) -> None:
        if rank == 1 and where == at:
            raise ValueError("uneven counters")

    engine: Any = object.__new__(DeepSpeedEngine)
    engine.mesh = run.mesh
    engine._optimizer = SimpleNamespace(finish_load=lambda: fail("before"))
    engine._storage = SimpleNamespace(
        refresh_weights=lambda: all_reduce_sum(torch.ones(1000), run.mesh.world_group),
        refresh_unrounded=lambda: fail("behind"),
    )
    with pytest.raises(CheckpointError) as caught:
        run.store.load(run.store.path_of(1), replace(run.state(), after_load=engine.after_load))
    return [str(caught.value)]


@pytest.mark.parametrize("where", ["before", "behind"])
def test_what_fails_on_one_rank_after_reading_fails_on_all(tmp_path: Path, where: str) -> None:
    answers = run_distributed(load_and_fail_after, 2, str(tmp_path), where)
    assert all("uneven counters" in answer[0] for answer in answers)


def load_damaged(rank: int, world_size: int, root: str) -> list[str]:
    run = Run(root, "ddp", 1)
    before = run.tensors()
    with pytest.raises(CheckpointError) as caught:
        run.store.load(Path(root) / "step_00000002", run.state())
    assert_equal(run.tensors(), before)
    return [str(caught.value)]


def test_damage_that_one_rank_finds_is_told_by_all(tmp_path: Path) -> None:
    one = Run(tmp_path, *ONE_PROCESS)
    one.store.save(2, one.state())
    path = one.store.path_of(2)
    for name in sorted(json.loads((path / "manifest.json").read_bytes())["files"])[:2]:
        good = (path / name).read_bytes()
        (path / name).write_bytes(good[:-1])
        answers = run_distributed(load_damaged, 2, str(tmp_path))
        assert answers[0] == answers[1]
        assert f"{path / name}: damaged, {len(good) - 1} bytes instead of {len(good)}" in answers[0][0]
        (path / name).write_bytes(good)


def load_with_a_hole(rank: int, world_size: int, root: str) -> list[str]:
    run = Run(root, "ddp", 1)
    real, audits = checkpoint_index.check_coverage, []
    checkpoint_index.check_coverage = lambda *args: (audits.append(args), real(*args))
    with pytest.raises(CheckpointError) as caught:
        run.store.load(Path(root) / "step_00000002", run.state())
    assert len(audits) == (1 if rank == 0 else 0)
    return [str(caught.value)]


def test_one_rank_audits_and_all_refuse(tmp_path: Path) -> None:
    one = Run(tmp_path, *ONE_PROCESS)
    one.store.save(2, one.state())
    path = one.store.path_of(2)
    index = json.loads((path / "index.json").read_bytes())
    index["tensors"]["model.embedding"]["slices"][0]["sizes"][0] -= 1
    files.write_durably(path / "index.json", files.to_json(index))
    files.write_manifest(path, files.read_manifest(path) | files.describe_files([path / "index.json"]))
    answers = run_distributed(load_with_a_hole, 2, str(tmp_path))
    assert answers[0] == answers[1]
    assert "model.embedding[6:7, 0:6] of shape (7, 6) is in no slice" in answers[0][0]


def prepare_unwritable(rank: int, world_size: int, root: str) -> list[str]:
    run = Run(Path(root) / "file", "ddp", 1)
    with pytest.raises(ConfigError if rank == 0 else CheckpointError) as caught:
        run.store.prepare()
    return [str(caught.value)]


def test_an_unwritable_folder_stops_all_ranks_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answers = run_distributed(prepare_unwritable, 2, str(tmp_path))
    assert answers[0] == answers[1]
    assert "cannot be written: a file is in the way" in answers[0][0]


def skip_together(rank: int, world_size: int, root: str, engine_name: str, ep_size: int) -> list[int]:
    run = Run(root, engine_name, ep_size)
    run.train(1)
    before = run.tensors()
    run.train(1, poisoned_rank=1)
    assert_equal(run.tensors(), before)
    skipped = [run.optimizer.num_skipped_updates]
    run.train(1)
    norm = all_reduce_sum(torch.stack([tensor.norm() for tensor in run.tensors().values()]), run.mesh.world_group)
    assert torch.isfinite(norm).all()
    run.store.save(3, run.state())
    other = Run(root, engine_name, ep_size)
    other.store.load(run.store.path_of(3), other.state())
    return [*skipped, run.optimizer.num_skipped_updates, other.optimizer.num_skipped_updates]


@pytest.mark.parametrize("layout", ["ddp-ep2", "fsdp2-dp2"])
def test_f113_nan_on_one_rank_skips_the_update_on_all(tmp_path: Path, layout: str) -> None:
    assert run_distributed(skip_together, 2, str(tmp_path), *LAYOUTS[layout][1:]) == [[1, 1, 1], [1, 1, 1]]
