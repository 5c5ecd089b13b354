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
from megatron_glue.types import ForwardContext, PackedSequence


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


def test_parts_of_one_rank_share_the_room_for_reload_buffers(tmp_path: Path) -> None:
    config = from_dict({"training": {"accelerator": {"enable_double_buffer": True, "buffer_size_mb": 3}}})
    place = BuildPlace(ParallelMesh(), torch.device("cpu"), HostReader(), tmp_path)
    for num_parts in (1, 2):
        manager = build_activation_manager(config, place, num_parts=num_parts)
        x_TD = torch.zeros(2**18, 1, requires_grad=True)
        manager.run_block(Cubic(), x_TD, ForwardContext(PackedSequence.from_lengths([2**18])))
        # Two inputs of 1 MiB fit into 3 MiB, and one into a half of it.
        assert ("two reload buffers" if num_parts == 1 else "one reload buffer") in manager.describe()
        manager.close()


class Cubic(torch.nn.Module):
    """A block that keeps something for backward."""

    def forward(self, x_TD: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return x_TD**3


def test_a_gpu_has_no_bound_on_its_rate(tmp_path: Path) -> None:
    config = from_dict({"activation": {"activation_offload": True, "offload_max_mb_per_s": 5.0}})
    place = BuildPlace(ParallelMesh(), torch.device("cuda"), HostReader(), tmp_path)
    with pytest.raises(ConfigError, match=r"--offload-max-mb-per-s=5.0: .* use --offload-max-inflight 1"):
        build_activation_manager(config, place)
