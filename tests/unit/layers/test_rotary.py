import pytest
import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.layers.rotary import RotaryConfig, rotary_rows
from megatron_glue.ops.rope import rope_table
from megatron_glue.types import PackedSequence
from tests.support.layer_cases import build_blocks, gradients, pack, small_model
from tests.support.operator_watch import OperatorWatch


def test_settings_come_from_the_model():
    assert RotaryConfig.of_model(small_model(rotary_base=500.0)) == RotaryConfig(256, 8, 500.0)
    assert RotaryConfig.of_model(small_model(rotary_percent=0.4)) == RotaryConfig(256, 2, 10000.0)
    assert RotaryConfig.of_model(small_model(position_embedding_type="none")) is None


def test_contradictions_are_named():
    with pytest.raises(ConfigError, match="rotary_percent"):
        RotaryConfig.of_model(small_model(rotary_percent=0.1))
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        RotaryConfig.of_model(small_model(max_position_embeddings=None))


def test_rows_are_those_of_the_positions():
    sequence = PackedSequence.from_lengths([3, 2], 1, position_starts=[0, 7])
    cos, sin = rotary_rows(RotaryConfig(16, 4, 100.0), sequence)
    table_cos, table_sin = rope_table(16, 4, 100.0, "cpu")
    assert torch.equal(cos, table_cos[[0, 1, 2, 7, 8, 0]])
    assert torch.equal(sin, table_sin[[0, 1, 2, 7, 8, 0]])


def test_tables_are_built_once_and_never_per_step():
    blocks, _ = build_blocks(small_model(rotary_base=777.0))
    gradients(blocks, pack("mixed"))
    with OperatorWatch() as watch:
        gradients(blocks, pack("many short"))
    assert not {"aten::sin", "aten::cos"} & set(watch.calls)


def test_f21_tables_follow_the_device():
    config = RotaryConfig(16, 4, 100.0)
    sequence = PackedSequence.from_lengths([3])
    assert rotary_rows(config, sequence)[0].device.type == "cpu"
    assert rotary_rows(config, sequence.to("meta"))[0].device.type == "meta"
    assert rotary_rows(config, sequence)[0].device.type == "cpu"
