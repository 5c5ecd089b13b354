"""The one error for users."""

from megatron_glue.config.errors import ConfigError


def test_it_is_one_line_with_field_value_reason_and_remedy() -> None:
    error = ConfigError("--seed", -1, "not a whole number of at least 0", "give one")
    assert str(error) == "--seed=-1: not a whole number of at least 0; give one"
    assert (error.field, error.value, error.reason, error.remedy) == (
        "--seed",
        -1,
        "not a whole number of at least 0",
        "give one",
    )
    assert isinstance(error, ValueError)


def test_an_absent_value_is_not_shown() -> None:
    assert str(ConfigError("--seed", "", "expected one argument", "see --help")).startswith("--seed: expected")
