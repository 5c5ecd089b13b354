"""Megatron-LM's flags are what docs/from_megatron.md says: each of them is asked of the command line here."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megatron_glue.config import megatron_flags
from megatron_glue.config.command_line import CommandLine, parse_command_line
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import FieldSpec, field_specs, value_to_word
from megatron_glue.training.presets import GPT_DEFAULTS, MOE_DEFAULTS
from tools.config_reference import (
    MEGATRON_NAMES,
    MEGATRON_PAGE,
    OTHER_VALUES,
    current,
    default_there,
    is_taken,
    render_megatron,
    same_flags,
    unknown_flags,
)

NAMES: dict[str, dict[str, Any]] = yaml.safe_load(MEGATRON_NAMES.read_text(encoding="utf-8"))
SAME = same_flags(NAMES)
OF_OTHERS = {"--deepspeed"}
"""Translated flags that come from other programs than Megatron-LM."""


def parse(*words: str) -> CommandLine:
    return parse_command_line(words, GPT_DEFAULTS)


def sample(spec: FieldSpec) -> str:
    """A word that the field must take."""
    if spec.words:
        return next(iter(spec.words))
    return {"int": "2", "ints": "2", "float": "0.5", "str": "x", "strs": "x"}[spec.kind]


def test_the_page_is_current() -> None:
    page = MEGATRON_PAGE.read_text(encoding="utf-8")
    assert current(page, render_megatron) == page, "run python tools/config_reference.py"


def test_the_list_is_whole() -> None:
    assert len(NAMES) > 800
    assert all(str(entry["words"]) in ("0", "1", "3", "+", "*") for entry in NAMES.values())
    tables = (megatron_flags.TRANSLATED, megatron_flags.SATISFIED, megatron_flags.IGNORED, megatron_flags.REFUSED)
    assert {flag for table in tables for flag in table} - NAMES.keys() == OF_OTHERS, "a name that Megatron-LM lacks"


@pytest.mark.parametrize("flag", SAME)
def test_a_flag_that_is_called_the_same_parses(flag: str) -> None:
    spec = SAME[flag]
    is_switch = spec.kind == "bool" and not spec.words
    assert is_switch == (NAMES[flag]["words"] == 0), "one takes a value, the other does not"
    parsed = parse(flag) if is_switch else parse(flag, sample(spec))
    assert [override.spec for override in parsed.overrides] == [spec]
    assert not parsed.ignored


def test_values_of_another_kind_stand_on_the_page_in_words() -> None:
    assert SAME.keys() >= OTHER_VALUES
    by_hand = MEGATRON_PAGE.read_text(encoding="utf-8").partition("<!-- generated")[0]
    assert all(f"`{flag}" in by_hand for flag in OTHER_VALUES)


@pytest.mark.parametrize("flag", megatron_flags.TRANSLATED)
def test_a_renamed_flag_sets_fields_that_exist(flag: str) -> None:
    for word, values in megatron_flags.TRANSLATED[flag].words.items():
        assert values.keys() <= field_specs().keys()
        parsed = parse(flag, word) if word else parse(flag)
        assert {override.spec.name: override.value for override in parsed.overrides} == values


def test_words_that_are_not_taken_are_errors() -> None:
    assert is_taken("--optimizer", "adam")
    assert not is_taken("--optimizer", "muon")
    with pytest.raises(ConfigError, match="not available here"):
        parse("--moe-router-load-balancing-type", "global_aux_loss")
    with pytest.raises(ConfigError, match="not one of"):
        parse("--lr-decay-style", "inverse-square-root")


@pytest.mark.parametrize(("table", "is_told"), [("SATISFIED", False), ("IGNORED", True)])
def test_accepted_flags_take_as_many_words_as_there(table: str, is_told: bool) -> None:
    for flag, num_words in getattr(megatron_flags, table).items():
        assert NAMES[flag]["words"] == num_words, flag
        parsed = parse(flag, *["1"] * num_words)
        assert parsed.ignored == ([flag] if is_told else [])
        assert parsed.overrides == []


@pytest.mark.parametrize("flag", megatron_flags.REFUSED)
def test_a_refused_flag_says_why(flag: str) -> None:
    refusal = megatron_flags.REFUSED[flag]
    assert NAMES[flag]["words"] == refusal.num_values
    with pytest.raises(ConfigError) as error:
        parse(flag, *["1"] * refusal.num_values)
    assert refusal.reason in str(error.value)
    assert refusal.remedy in str(error.value)


def test_all_others_are_unknown() -> None:
    unknown = unknown_flags(NAMES)
    tables = (SAME, megatron_flags.TRANSLATED, megatron_flags.SATISFIED, megatron_flags.IGNORED, megatron_flags.REFUSED)
    assert len(unknown) + sum(len(table.keys() & NAMES.keys()) for table in tables) == len(NAMES), "counted twice"
    for flag in unknown:
        with pytest.raises(ConfigError, match="unknown flag"):
            parse(flag)


def test_defaults_of_megatron_are_written_as_flags_that_give_them() -> None:
    def there(flag: str) -> Any:
        return default_there(NAMES, flag, SAME[flag])

    assert there("--swiglu") is False
    assert there("--disable-bias-linear") is True
    assert there("--normalization") == "LayerNorm"
    assert there("--position-embedding-type") == "learned"
    assert there("--moe-z-loss-coeff") == 0
    assert there("--lr") is None
    page = render_megatron()
    for flag in ("--swiglu", "--normalization", "--moe-z-loss-coeff"):
        spec = SAME[flag]
        value = there(flag)
        written = spec.off_flags[0] if value is False else f"{flag} {value_to_word(spec, value)}"
        assert f"`{written}` |" in page
        (override,) = parse(*written.split()).overrides
        assert override.value == value


def test_both_entry_points_have_the_defaults_of_the_page() -> None:
    for section in ("model", "optimizer", "parallel"):
        assert getattr(GPT_DEFAULTS, section) == getattr(MOE_DEFAULTS, section)
