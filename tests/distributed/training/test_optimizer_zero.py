"""Checkpoints of runs under ZeRO: what one layout or engine wrote, any other reads, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.deepspeed_runs import ToyRun, needs_deepspeed
from tests.support.processes import run_distributed
from tests.support.tolerances import assert_close

pytestmark = needs_deepspeed

SHARD_EVERYTHING = {"stage3_param_persistence_threshold": 0, "sub_group_size": 60}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# world, (engine, stage, ep), bf16, section zero_optimization of DeepSpeed's file. Stage 3 has no experts.
RUNS = {
    "stage1-ep2": (2, ("deepspeed", 1, 2), False, {}),
    "stage2-ep2xdp2": (4, ("deepspeed", 2, 2), False, {}),
    "stage2-offload": (2, ("deepspeed", 2, 1), False, OFFLOAD),
    "stage1-bf16": (4, ("deepspeed", 1, 2), True, {}),
    "stage2-bf16": (2, ("deepspeed", 2, 1), True, {}),
    "stage3": (4, ("deepspeed", 3, 1), False, {}),
    "stage3-sharded": (2, ("deepspeed", 3, 1), False, SHARD_EVERYTHING),
    "stage3-bf16": (2, ("deepspeed", 3, 1), True, SHARD_EVERYTHING),
}
Layout = tuple[str, int | None, int]


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert actual.keys() == expected.keys(), what
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), f"{what}: {name}"


def save_resume_and_change(
    rank: int, world_size: int, root: str, layout: Layout, bf16: bool, config_path: str
) -> dict[str, torch.Tensor]:
    """Straight on against stopped and resumed; then through another engine and back."""
    options = {"bf16": bf16, "has_experts": layout[1] != 3}
    run = ToyRun(*layout, **options, config_path=config_path)
    run.train(2)
    run.store(root).save(2, run.state())
    saved = run.tensors()
    run.train(1)
    straight = run.tensors()

    resumed = ToyRun(*layout, **options, config_path=config_path)
    resumed.scramble()
    store = resumed.store(root)
    loaded = store.load(store.find_latest(), resumed.state())
    assert loaded.step == 2
    assert_equal(resumed.tensors(), saved, "read")
    resumed.train(1)
    assert_equal(resumed.tensors(), straight, "resumed")

    other = ToyRun("fsdp2" if layout[2] == 1 else "ddp", None, layout[2], **options)
    other.scramble()
    store = other.store(root)
    store.load(store.find_latest(), other.state())
    assert_equal(other.tensors(), saved, "read by another engine")
    other.train(1)
    for name, tensor in straight.items():
        assert_close(other.tensors()[name], tensor, what=name, tolerance=5e-2 if bf16 else 1e-4)
    store.save(3, other.state())
    changed = other.tensors()

    back = ToyRun(*layout, **options, config_path=config_path)
    back.scramble()
    store = back.store(root)
    store.load(store.find_latest(), back.state())
    assert_equal(back.tensors(), changed, "read back")
    back.backward()
    other.backward()
    tolerance = 5e-2 if bf16 else 1e-4
    for name, gradient in other.engine.full_gradients().items():
        assert_close(back.engine.full_gradients()[name], gradient, what=f"gradient of {name}", tolerance=tolerance)
    return saved


@pytest.mark.parametrize("name", RUNS)
def test_f104_resumed_bit_equal_and_read_by_other_engines(tmp_path: Path, name: str) -> None:
    world_size, layout, bf16, section = RUNS[name]
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": section}))
    saved = run_distributed(
        save_resume_and_change, world_size, str(tmp_path), layout, bf16, str(file), timeout_s=120.0
    )[0]
    one = ToyRun(bf16=bf16, has_experts=layout[1] != 3)
    one.scramble()
    one.store(tmp_path).load(tmp_path / "step_00000002", one.state())
    assert_equal(one.tensors(), saved, "read by one process")


def read_by_many(rank: int, world_size: int, root: str, layout: Layout) -> dict[str, torch.Tensor]:
    run = ToyRun(*layout)
    run.scramble()
    run.store(root).load(Path(root) / "step_00000002", run.state())
    return run.tensors()


def save_alone(rank: int, world_size: int, root: str, layout: Layout) -> dict[str, torch.Tensor]:
    run = ToyRun(*layout)
    run.train(2)
    run.store(root).save(2, run.state())
    return run.tensors()


def test_f103_f104_other_numbers_of_ranks_and_expert_parallel_sizes(tmp_path: Path) -> None:
    saved = run_distributed(save_alone, 4, str(tmp_path), ("deepspeed", 2, 2))[0]
    for world_size, layout in ((2, ("deepspeed", 1, 1)), (2, ("deepspeed", 0, 2)), (4, ("deepspeed", 1, 4))):
        assert_equal(run_distributed(read_by_many, world_size, str(tmp_path), layout)[0], saved, str(layout))


def test_each_rank_writes_its_own_part(tmp_path: Path) -> None:
    run_distributed(save_alone, 2, str(tmp_path), ("deepspeed", 1, 1))
    tensors = json.loads((tmp_path / "step_00000002" / "index.json").read_bytes())["tensors"]
    writers: dict[str, int] = {}
    for name, entry in tensors.items():
        if name.startswith("optimizer.") and not name.endswith(".step"):
            for part in entry["slices"]:
                count = 1
                for size in part["sizes"]:
                    count *= size
                writers[part["file"]] = writers.get(part["file"], 0) + count
    assert len(writers) == 2
    smaller, larger = sorted(writers.values())
    assert larger < 1.1 * smaller, "moments are cut evenly"


def save_before_the_first_step(rank: int, world_size: int, root: str) -> None:
    run = ToyRun("deepspeed", 1)
    fresh = run.tensors()
    run.store(root).save(0, run.state())
    other = ToyRun("deepspeed", 2)
    other.scramble()
    other.store(root).load(Path(root) / "step_00000000", other.state())
    assert_equal(other.tensors(), fresh, "fresh")
    other.train(1)
    run.train(1)
    for name, tensor in run.tensors().items():
        assert_close(other.tensors()[name], tensor, what=name)


def test_a_checkpoint_before_the_first_step(tmp_path: Path) -> None:
    run_distributed(save_before_the_first_step, 2, str(tmp_path))


def read_uneven_counters(rank: int, world_size: int, root: str) -> list[str]:
    run = ToyRun("deepspeed", 1)
    for name, _, state in run.optimizer.named_state():
        state["step"].fill_(5.0 if name == "embedding" else 6.0)
    with pytest.raises(ValueError, match="was updated 6 times, others of its group 5 times") as error:
        run.engine.after_load()
    return [str(error.value)]


def test_counters_that_one_group_cannot_hold_are_refused(tmp_path: Path) -> None:
    run_distributed(read_uneven_counters, 2, str(tmp_path))
