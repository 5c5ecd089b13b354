"""What stops a model from being built, in words for the user."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import from_dict
from megatron_glue.models.build import BuildPlace, build_activation_manager
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.mesh import ParallelMesh


def test_an_offload_folder_that_cannot_be_used_is_one_line_with_one_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("")
    place = BuildPlace(ParallelMesh(), torch.device("cpu"), HostReader(), folder)
    with pytest.raises(ConfigError) as caught:
        build_activation_manager(from_dict({"activation": {"activation_offload": True}}), place)
    assert str(caught.value) == (
        f"--activation-offload-dir={folder}: activations cannot be offloaded there: File exists; "
        "give a folder on a local disk with room"
    )
