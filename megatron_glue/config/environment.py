"""The one file that reads the process environment: settings in ``MEGATRON_GLUE_*``.

What a launcher leaves there is understood by ``launchers.py``, whose names stand here too.

Everything else receives what it needs as values, so that tests and several runs in one process need no environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import ENVIRONMENT_PREFIX, Override, field_specs, nearest, parse_switch, parse_words
from megatron_glue.config.launchers import LAUNCHER_NAMES, RankEnvironment

__all__ = [
    "CONFIG_NAME",
    "DISABLE_NAME",
    "LAUNCHER_NAMES",
    "RankEnvironment",
    "environment_overrides",
    "is_disabled",
    "read_environment",
    "set_environment_default",
]

DISABLE_NAME = ENVIRONMENT_PREFIX + "DISABLE"
CONFIG_NAME = ENVIRONMENT_PREFIX + "CONFIG"


def read_environment() -> dict[str, str]:
    """Return a copy of the process environment."""
    return dict(os.environ)


def set_environment_default(name: str, value: str) -> None:
    """Set a variable for libraries that this process is going to load, unless it is set to something."""
    if not os.environ.get(name):
        os.environ[name] = value


def environment_overrides(environ: Mapping[str, str]) -> list[Override]:
    """Read the fields that ``MEGATRON_GLUE_<FIELD>`` variables set.

    Args:
        environ: The environment. Lists are given as on the command line, separated by spaces.

    Raises:
        ConfigError: For an unknown name behind the prefix or a value that does not fit.
    """
    by_name = {spec.environment_name: spec for spec in field_specs().values()}
    overrides = []
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in (DISABLE_NAME, CONFIG_NAME):
            continue
        text = environ[name]
        if name not in by_name:
            suggestion = nearest(name, [*by_name, DISABLE_NAME, CONFIG_NAME])
            remedy = f"did you mean {suggestion}?" if suggestion else "unset it"
            raise ConfigError(name, text, "unknown setting in the environment", remedy)
        spec = by_name[name]
        words = text.split() if spec.kind in ("ints", "strs") else [text]
        if spec.kind == "ints" and not words:
            raise spec.error(name, text)
        overrides.append(Override(spec, parse_words(spec, words, name), name, f"environment {name}"))
    return overrides


def environment_config_files(environ: Mapping[str, str]) -> list[str]:
    """Return the YAML files that ``MEGATRON_GLUE_CONFIG`` names, in order; they stand below those of ``--config``.

    Args:
        environ: The environment. Several files are separated like the folders of ``PATH``.
    """
    return [path for path in environ.get(CONFIG_NAME, "").split(os.pathsep) if path]


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Whether ``MEGATRON_GLUE_DISABLE`` turns every optimisation off.

    Raises:
        ConfigError: When it is neither a yes nor a no.
    """
    text = environ.get(DISABLE_NAME, "0")
    try:
        return parse_switch(text)
    except ValueError as error:
        raise ConfigError(DISABLE_NAME, text, "neither 1 nor 0", "set it to 1 or unset it") from error
