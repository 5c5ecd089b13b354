"""Flags, names and words derived from the sections."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import field_specs, flag_of, nearest, parse_words, value_to_word
from megatron_glue.config.sections import RunConfig


def test_names_follow_from_the_field() -> None:
    spec = field_specs()["enable_metadata_cache"]
    assert spec.key == "training.accelerator.enable_metadata_cache"
    assert spec.flag == "--use-packed-cache"
    assert spec.off_flags == ("--no-use-packed-cache",)
    assert spec.environment_name == "MEGATRON_GLUE_ENABLE_METADATA_CACHE"
    assert flag_of("num_layers") == "--num-layers"
    assert field_specs()["add_bias_linear"].off_flags == ("--no-add-bias-linear", "--disable-bias-linear")


def test_the_accelerator_block_has_exactly_the_promised_keys() -> None:
    keys = [spec.name for spec in field_specs().values() if spec.section == "training.accelerator"]
    assert keys == [
        "enable_metadata_cache",
        "cache_scope",
        "enable_double_buffer",
        "buffer_size_mb",
        "enable_grouped_index",
        "log_level",
        "metrics_interval",
    ]


def test_flags_and_environment_names_are_unique() -> None:
    flags = [flag for spec in field_specs().values() for flag in (spec.flag, *spec.off_flags)]
    assert len(set(flags)) == len(flags)


def test_every_field_says_what_it_is() -> None:
    for spec in field_specs().values():
        assert spec.doc.endswith("."), spec.key
        if spec.kind == "bool":
            assert "off" in spec.doc, f"{spec.key} does not say what off means"
    sections = {spec.section for spec in field_specs().values()}
    assert all(sum(spec.section == section for spec in field_specs().values()) <= 25 for section in sections)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["2"], 2),
        (["0", "1", "1"], (0, 1, 1)),
        (["0,", "1"], (0, 1)),
        (["0,1,1"], (0, 1, 1)),
        (["[0,1,1]"], (0, 1, 1)),
        (["([0]*2+[1]*3)"], (0, 0, 1, 1, 1)),
        (["2*[1]"], (1, 1)),
    ],
)
def test_layer_patterns_in_megatrons_way(words: list[str], value: object) -> None:
    assert parse_words(field_specs()["moe_layer_freq"], words, "--moe-layer-freq") == value


@pytest.mark.parametrize(
    "text",
    [
        "x", "[0", "1.5", "[[1]]", "[True]", "__import__('os')", "[0]*10**9", "[0]*99999999", "(1 for _ in [1])", "",
        "[1]-[0]", "1+1", "[1.0]", "(" * 300, "[1]+2", "[0]*5001+[0]*5001",
    ],
)  # fmt: skip
def test_layer_patterns_evaluate_nothing(text: str) -> None:
    with pytest.raises(ConfigError, match="not a whole number of at least 1, or a list"):
        parse_words(field_specs()["moe_layer_freq"], [text], "--moe-layer-freq")


@pytest.mark.parametrize("text", ["1", "true", "Yes", "ON"])
def test_switches_on(text: str) -> None:
    assert parse_words(field_specs()["swiglu"], [text], "X") is True


@pytest.mark.parametrize("text", ["0", "false", "No", "OFF"])
def test_switches_off(text: str) -> None:
    assert parse_words(field_specs()["swiglu"], [text], "X") is False


@pytest.mark.parametrize(
    ("name", "text"), [("swiglu", "maybe"), ("num_layers", "3.0"), ("lr", "nan"), ("lr", "inf"), ("device", "tpu")]
)
def test_words_that_do_not_fit(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_words(field_specs()[name], [text], "WRITTEN")
    assert (caught.value.field, caught.value.value) == ("WRITTEN", text)


def test_none_unsets_an_optional_number_but_is_a_word_for_a_text() -> None:
    assert parse_words(field_specs()["ffn_hidden_size"], ["none"], "X") is None
    assert parse_words(field_specs()["save"], ["none"], "X") == "none"
    assert parse_words(field_specs()["position_embedding_type"], ["none"], "X") == "none"


def test_words_stand_for_booleans() -> None:
    spec = field_specs()["enable_grouped_index"]
    assert parse_words(spec, ["one-pass"], "X") is True
    assert parse_words(spec, ["loop"], "X") is False
    assert value_to_word(spec, False) == "loop"


def test_every_default_passes_through_its_own_words() -> None:
    for spec in field_specs().values():
        if spec.default is not None and spec.default != ():
            words = value_to_word(spec, spec.default)
            assert parse_words(spec, [words], spec.flag) == spec.default


def test_nearest() -> None:
    assert nearest("--num-layer", ["--num-layers", "--hidden-size"]) == "--num-layers"
    assert nearest("zzzz", ["--num-layers"]) == ""


@given(st.text(max_size=30))
def test_any_text_is_a_value_or_a_config_error(text: str) -> None:
    for spec in field_specs().values():
        try:
            parse_words(spec, [text], spec.flag)
        except ConfigError as error:
            assert error.field == spec.flag  # noqa: PT017


def test_defaults_are_those_of_the_run_config() -> None:
    assert field_specs()["train_iters"].default == RunConfig().training.train_iters
