"""YAML in and out."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import LoggingConfig, ModelConfig, OptimizerConfig, RunConfig
from megatron_glue.config.yaml_files import read_yaml, to_yaml


def _read(folder: Path, text: str) -> dict[str, object]:
    file = folder / "run.yaml"
    file.write_text(text)
    return {override.spec.key: override.value for override in read_yaml(str(file))}


def test_sections_and_the_nested_accelerator_block(tmp_path: Path) -> None:
    text = """
model: {num_layers: 7, swiglu: false, window_attn_skip_freq: [0, 1]}
moe:
training:
  train_iters: 5
  accelerator: {enable_double_buffer: true, enable_grouped_index: loop}
"""
    assert _read(tmp_path, text) == {
        "model.num_layers": 7,
        "model.swiglu": False,
        "model.window_attn_skip_freq": (0, 1),
        "training.train_iters": 5,
        "training.accelerator.enable_double_buffer": True,
        "training.accelerator.enable_grouped_index": False,
    }
    assert _read(tmp_path, "") == {}


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("1.5E+2", 150.0), ("2e-3", 2e-3), ("0.001", 1e-3)])
def test_floats_without_a_point_are_numbers(tmp_path: Path, text: str, value: float) -> None:
    assert _read(tmp_path, f"optimizer: {{lr: {text}}}") == {"optimizer.lr": value}


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("model:\n  num_layers: 1\n  num_layers: 2\n", 3, "already given in line 2"),
        ("model: {}\nmodel: {}\n", 2, "already given in line 1"),
        ("- a\n", 1, "not a mapping"),
        ("model:\n  - 1\n", 2, "not a mapping"),
        ("model: [1,\n", 2, "not YAML"),
        ("model:\n  num_layer: 1\n", 2, "did you mean model.num_layers"),
        ("model:\n  num_experts: 1\n", 2, "did you mean moe.num_experts"),
        ("model:\n  num-layers: 1\n", 2, "did you mean model.num_layers"),
        ("\nmodell: {}\n", 2, "did you mean model"),
        ("accelerator: {}\n", 1, "did you mean training.accelerator"),
        ("model:\n  num_layers: null\n", 2, "not a whole number"),
        ("--- {}\n--- {}\n", 2, "not YAML"),
        ("model:\n  num_layers: \0\n", 1, "not YAML"),
        ("model:\n  num_layers: 2026-13-45\n", 2, "not a whole number"),
        ("model:\n  num_layers: !!int many\n", 2, "not a whole number"),
        (f"model:\n  num_layers: {'9' * 5000}\n", 2, "not a whole number"),
        ('training:\n  save: "a\\0b"\n', 2, "training.save"),
        ("model: !!python/object/apply:os.getcwd []\n", 1, "not a mapping"),
        ("model: {num_layers: !!python/object/apply:os.getcwd []}\n", 1, "not YAML"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, text: str, line: int, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        _read(tmp_path, text)
    assert caught.value.field.startswith(f"{tmp_path / 'run.yaml'}:{line}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_yaml(str(tmp_path / "none.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_yaml(str(tmp_path / "binary.yaml"))


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    config = RunConfig(model=ModelConfig(window_attn_skip_freq=(0, 1, 1, 0)), optimizer=OptimizerConfig(adam_eps=1e-15))
    keys = _read(tmp_path, to_yaml(config))
    assert keys["model.window_attn_skip_freq"] == (0, 1, 1, 0)
    assert keys["optimizer.adam_eps"] == 1e-15
    assert next(iter(yaml.safe_load(to_yaml(config))["training"]["accelerator"])) == "enable_metadata_cache"


def test_endless_nesting_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        _read(tmp_path, "model: {num_layers: " + "[" * 5000 + "]" * 5000 + "}")


def test_sources_are_comments_that_change_no_value(tmp_path: Path) -> None:
    config = RunConfig(
        model=ModelConfig(window_size=4, window_attn_skip_freq=(0, 1, 1, 0)),
        logging=LoggingConfig(sample_prompt="two\nlines # 'and' more"),
    )
    provenance = {"window_size": "file a\nb.yaml", "window_attn_skip_freq": "command line", "sample_prompt": "x: y"}
    text = to_yaml(config, provenance)
    assert yaml.safe_load(text) == config.model_dump(mode="json")
    assert "  window_size: 4  # file a?b.yaml\n" in text
    assert "  # command line\n  window_attn_skip_freq:\n" in text
    assert text.count("#") == 4
