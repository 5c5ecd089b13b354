"""Several ranks start from the same checkpoint, whichever of them finds the damage or the folder missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.training.checkpoint.source import find_source, load_source
from megatron_glue.training.checkpoint.store import CheckpointError
from tests.distributed.training.checkpoint.test_store import Run, assert_equal
from tests.support.processes import run_distributed


def start_from_another_run(rank: int, world_size: int, root: str) -> list[str]:
    other = Run(Path(root) / "other", "ddp", 2)
    other.store._keep_last = 9
    states = {}
    for step in (1, 2, 3):
        other.train(1)
        other.store.save(step, other.state())
        states[step] = other.tensors()
    # Each rank verifies some of the files: damage of one is seen by one.
    for step, name in ((3, "__0_0.distcp"), (2, "__1_0.distcp")):
        if rank == 0:
            path = Path(root) / f"other/step_0000000{step}/{name}"
            path.write_bytes(path.read_bytes()[:-1])
    run = Run(Path(root) / "own", "ddp", 1)
    run.scramble()
    source = find_source(run.store, str(Path(root) / "other"))
    assert source is not None
    told = []
    with pytest.raises(CheckpointError) as refused:
        load_source(run.store, source, run.state(), may_fall_back=False)
    told.append(str(refused.value))
    start = load_source(run.store, source, run.state(), may_fall_back=True)
    assert start.loaded.step == 1
    assert_equal(run.tensors(), states[1])
    told += [*start.warnings, *start.notes]
    single = find_source(run.store, str(Path(root) / "other/step_00000001"))
    assert single is not None
    assert [path.name for path in single.paths] == ["step_00000001"]
    with pytest.raises(ConfigError if rank == 0 else CheckpointError) as missing:
        find_source(run.store, str(Path(root) / "missing"))
    return [*told, str(missing.value)]


def test_ranks_agree_on_where_to_start_from(tmp_path: Path) -> None:
    first, second = run_distributed(start_from_another_run, 2, str(tmp_path))
    assert first == second
    refused, fallback, _, missing = first
    assert "step_00000003/__0_0.distcp: damaged" in refused
    assert "--load-fallback takes the newest good checkpoint before it" in refused
    assert fallback.endswith(f"falling back to {tmp_path}/other/step_00000001")
    assert "is no folder" in missing
