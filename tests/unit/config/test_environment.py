"""The environment: settings and the launcher's variables."""

from __future__ import annotations

import pytest

from megatron_glue.config.environment import (
    LAUNCHER_NAMES,
    RankEnvironment,
    environment_overrides,
    is_disabled,
    read_environment,
)
from megatron_glue.config.errors import ConfigError

LAUNCHED = dict(zip(LAUNCHER_NAMES, ("5", "1", "8", "4", "node0", "29500"), strict=True))


def test_the_process_environment_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_GLUE_NUM_LAYERS", "3")
    environ = read_environment()
    monkeypatch.delenv("MEGATRON_GLUE_NUM_LAYERS")
    assert environ["MEGATRON_GLUE_NUM_LAYERS"] == "3"


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


def test_without_a_launcher_there_is_one_process() -> None:
    alone = RankEnvironment.from_mapping({"PATH": "/bin"})
    assert alone == RankEnvironment(0, 0, 1, 1, "", False)
    assert alone.is_main


def test_the_launchers_variables() -> None:
    environment = RankEnvironment.from_mapping(LAUNCHED)
    assert environment == RankEnvironment(5, 1, 8, 4, "node0", True)
    assert not environment.is_main


@pytest.mark.parametrize("missing", LAUNCHER_NAMES)
def test_f114_half_a_launcher_is_an_error(missing: str) -> None:
    with pytest.raises(ConfigError, match="not set, but") as caught:
        RankEnvironment.from_mapping({name: text for name, text in LAUNCHED.items() if name != missing})
    assert caught.value.field == missing


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("RANK", "x", "not a whole number"),
        ("RANK", "-1", "not a whole number"),
        ("RANK", "²", "not a whole number"),
        ("MASTER_PORT", "http", "not a whole number"),
        ("MASTER_PORT", "99999", "no port is above 65535"),
        ("RANK", "8", "must be below WORLD_SIZE=8"),
        ("LOCAL_RANK", "4", "must be below LOCAL_WORLD_SIZE=4"),
        ("LOCAL_WORLD_SIZE", "9", "exceeds WORLD_SIZE=8"),
    ],
)
def test_contradictions_of_a_launcher(name: str, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        RankEnvironment.from_mapping({**LAUNCHED, name: text})
    assert caught.value.field == name
