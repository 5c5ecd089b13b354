"""The one file that reads the process environment: settings in ``MEGATRON_GLUE_*`` and the launcher's variables.

Everything else receives what it needs as values, so that tests and several runs in one process need no environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import ENVIRONMENT_PREFIX, Override, field_specs, nearest, parse_switch, parse_words

DISABLE_NAME = ENVIRONMENT_PREFIX + "DISABLE"
CONFIG_NAME = ENVIRONMENT_PREFIX + "CONFIG"
LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read_environment() -> dict[str, str]:
    """Return a copy of the process environment."""
    return dict(os.environ)


def set_environment_default(name: str, value: str) -> None:
    """Set a variable for libraries that this process is going to load, unless it is set."""
    os.environ.setdefault(name, value)


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


@dataclass(frozen=True)
class RankEnvironment:
    """Who this process is among the processes of the run.

    Attributes:
        rank: Index of this process, 0 to ``world_size - 1``.
        local_rank: Its index on this machine.
        world_size: Number of processes of the run.
        local_world_size: Number of them on this machine.
        master_addr: Where rank 0 listens, empty when there is no launcher.
        launched_by_torchrun: Whether a launcher (torchrun, or one that sets the same variables) started this process.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = ""
    launched_by_torchrun: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that talks."""
        return self.rank == 0

    @classmethod
    def from_mapping(cls, environ: Mapping[str, str]) -> RankEnvironment:
        """Read the launcher's variables.

        They are all set or none is. Half of them means a broken launcher, and guessing would start each machine as a
        world of its own that hangs or trains alone.

        Args:
            environ: The environment.

        Raises:
            ConfigError: When only some are set, one is no number, or the numbers contradict each other.
        """
        present = [name for name in LAUNCHER_NAMES if environ.get(name)]
        if not present:
            return cls()
        missing = [name for name in LAUNCHER_NAMES if name not in present]
        if missing:
            raise ConfigError(
                missing[0],
                "",
                f"not set, but {', '.join(present)} {'is' if len(present) == 1 else 'are'}",
                "start with torchrun, or unset all of them",
            )
        rank, local_rank, world_size, local_world_size = (_number(environ, name) for name in LAUNCHER_NAMES[:4])
        if not 0 < (port := _number(environ, "MASTER_PORT")) < 2**16:
            raise ConfigError("MASTER_PORT", port, "no port is above 65535 or below 1", "start with torchrun")
        for name, value, size_name, size in (
            ("RANK", rank, "WORLD_SIZE", world_size),
            ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size),
        ):
            if value >= size:
                raise ConfigError(name, value, f"must be below {size_name}={size}", "start with torchrun")
        if local_world_size > world_size:
            raise ConfigError(
                "LOCAL_WORLD_SIZE", local_world_size, f"exceeds WORLD_SIZE={world_size}", "start with torchrun"
            )
        return cls(rank, local_rank, world_size, local_world_size, environ["MASTER_ADDR"], True)


def _number(environ: Mapping[str, str], name: str) -> int:
    """Read a count that must not be negative."""
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(name, text, "not a whole number", "start with torchrun, which sets it")
    return int(text)
