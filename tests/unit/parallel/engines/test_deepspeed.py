"""What the deepspeed engine refuses before DeepSpeed is loaded."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from torch import nn

from megatron_glue.config.errors import ConfigError
from megatron_glue.parallel.engines.deepspeed import DeepSpeedEngine
from megatron_glue.parallel.engines.deepspeed_config import DeepSpeedRun
from megatron_glue.parallel.engines.deepspeed_library import load_deepspeed
from megatron_glue.parallel.mesh import ParallelMesh
from tests.support.toy_moe import ToyModel


@pytest.fixture
def no_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place where the library is not installed."""
    real = importlib.import_module

    def import_module(name: str, package: str | None = None) -> Any:
        if name.split(".")[0] == "deepspeed":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)
    # It must not even be asked for before the engine is.
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")


@pytest.mark.usefixtures("no_deepspeed")
def test_a_missing_library_is_one_line_with_the_command() -> None:
    with pytest.raises(ConfigError) as error:
        load_deepspeed(torch.device("cpu"))
    line = str(error.value)
    assert line.startswith("--data-parallel-engine=deepspeed: ")
    assert "pip install 'megatron_glue[deepspeed]'" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("axis", "flag"),
    [
        ("tensor", "--tensor-model-parallel-size"),
        ("pp", "--pipeline-model-parallel-size"),
        ("cp", "--context-parallel-size"),
        ("etp", "--expert-tensor-parallel-size"),
    ],
)
@pytest.mark.usefixtures("no_deepspeed")
def test_other_axes_are_refused(axis: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}=2: .*ddp or fsdp2"):
        DeepSpeedEngine(nn.Linear(1, 1), ParallelMesh(world_size=2, sizes={axis: 2}), DeepSpeedRun())


@pytest.mark.usefixtures("no_deepspeed")
def test_experts_in_stage_3_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--zero-stage=3: .*experts.*--zero-stage 2"):
        DeepSpeedEngine(ToyModel(ParallelMesh()), ParallelMesh(), DeepSpeedRun(zero_stage=3))
