"""The environment: settings."""

from __future__ import annotations

import pytest

from megatron_glue.config.environment import (
    environment_overrides,
    is_disabled,
    read_environment,
    set_environment_default,
)
from megatron_glue.config.errors import ConfigError


def test_the_process_environment_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_GLUE_NUM_LAYERS", "3")
    environ = read_environment()
    monkeypatch.delenv("MEGATRON_GLUE_NUM_LAYERS")
    assert environ["MEGATRON_GLUE_NUM_LAYERS"] == "3"


def test_a_default_leaves_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, after in (("mine", "mine"), ("", "default")):
        monkeypatch.setenv("SOME_LIBRARY", before)
        set_environment_default("SOME_LIBRARY", "default")
        assert read_environment()["SOME_LIBRARY"] == after


def test_fields_by_name() -> None:
    environ = {
        "MEGATRON_GLUE_NUM_LAYERS": "3",
        "MEGATRON_GLUE_ENABLE_METADATA_CACHE": "1",
        "MEGATRON_GLUE_ENABLE_GROUPED_INDEX": "loop",
        "MEGATRON_GLUE_DATA_PATH": "a.jsonl b.jsonl",
        "MEGATRON_GLUE_MOE_LAYER_FREQ": "0 1",
        "MEGATRON_GLUE_SAMPLE_PROMPT": "two words",
        "MEGATRON_GLUE_DISABLE": "1",
        "PATH": "/bin",
    }
    values = {override.spec.name: override.value for override in environment_overrides(environ)}
    assert values == {
        "num_layers": 3,
        "enable_metadata_cache": True,
        "enable_grouped_index": False,
        "data_path": ("a.jsonl", "b.jsonl"),
        "moe_layer_freq": (0, 1),
        "sample_prompt": "two words",
    }
    assert environment_overrides({"MEGATRON_GLUE_SEED": "0"})[0].source == "environment MEGATRON_GLUE_SEED"


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("MEGATRON_GLUE_NUM_LAYER", "1", "did you mean MEGATRON_GLUE_NUM_LAYERS"),
        ("MEGATRON_GLUE_NUM_LAYERS", "one", "not a whole number"),
        ("MEGATRON_GLUE_MOE_LAYER_FREQ", "", "not a whole number"),
    ],
)
def test_wrong_names_and_values(name: str, text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        environment_overrides({name: text})
    assert caught.value.field == name


def test_disable() -> None:
    assert not is_disabled({})
    assert is_disabled({"MEGATRON_GLUE_DISABLE": "1"})
    assert not is_disabled({"MEGATRON_GLUE_DISABLE": "0"})
    with pytest.raises(ConfigError, match="neither 1 nor 0"):
        is_disabled({"MEGATRON_GLUE_DISABLE": "perhaps"})
