"""What is unpickled of a file of DeepSpeed's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_glue.training.checkpoint.deepspeed import _STAND_INS, _load, _ZeroStage
from megatron_glue.training.checkpoint.files import CheckpointError


class Lookup:
    """Pickled as a call of ``getattr``, which is how Python 3.11.0 to 3.11.3 pickle a member of an enum."""

    def __init__(self, owner: object, name: str) -> None:
        self._call = (getattr, (owner, name))

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return self._call


def test_a_stage_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = (_ZeroStage, f"{_ZeroStage.__module__}.{_ZeroStage.__qualname__}")
    monkeypatch.setattr("megatron_glue.training.checkpoint.deepspeed._STAND_INS", [*_STAND_INS, here])
    torch.save({"zero_stage": Lookup(_ZeroStage, "gradients")}, tmp_path / "file.pt")
    assert _load(tmp_path / "file.pt") == {"zero_stage": 2}


def test_getattr_finds_nothing_else(tmp_path: Path) -> None:
    torch.save({"zero_stage": Lookup("text", "upper")}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="no ZeRO stage"):
        _load(tmp_path / "file.pt")
