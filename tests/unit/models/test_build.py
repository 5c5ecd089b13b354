"""What stops a model from being built, in words for the user."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import from_dict
from megatron_glue.models.build import BuildPlace, build_activation_manager, build_model
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


@pytest.mark.parametrize(
    ("activation", "num_blocks", "words"),
    [
        ({"offload_num_layers": 2}, 6, "inputs of 2 of 6 blocks"),
        ({"offload_num_layers": 2, "offload_policy": "auto"}, 6, "inputs of 2 of 6 blocks"),
        ({"offload_num_layers": 6}, 6, "block inputs offloaded"),
        ({}, 6, "block inputs offloaded"),
        (
            {
                "offload_num_layers": 2,
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 4,
            },
            6,
            "inputs of 2 of 4 blocks",
        ),
    ],
)
def test_a_number_of_inputs_is_a_share_of_the_recomputed_blocks_of_a_part(
    activation: dict[str, object], num_blocks: int, words: str, tmp_path: Path
) -> None:
    config = from_dict({"activation": {"activation_offload": True, **activation}})
    place = BuildPlace(ParallelMesh(), torch.device("cpu"), HostReader(), tmp_path)
    manager = build_activation_manager(config, place, num_blocks=num_blocks)
    assert words in manager.describe()
    manager.close()


@pytest.mark.parametrize(
    ("activation", "is_measured"),
    [
        ({"activation_offload": True, "offload_policy": "auto"}, True),
        ({"activation_offload": True, "offload_policy": "auto", "offload_num_layers": 1}, False),
        ({"activation_offload": True}, False),
        ({"recompute_granularity": "full", "offload_policy": "auto"}, False),
    ],
)
def test_what_a_user_said_is_not_measured(activation: dict[str, object], is_measured: bool, tmp_path: Path) -> None:
    place = BuildPlace(ParallelMesh(), torch.device("cpu"), HostReader(), tmp_path)
    built = build_model(from_dict({"activation": activation, "model": {"num_layers": 2, "hidden_size": 32}}), 64, place)
    assert ("offload policy: decided after" in built.activation.describe()) == is_measured
    built.activation.close()
