"""From defaults, YAML files, environment and command line to one configuration that knows where each value came from.

Precedence: defaults < YAML (files of ``MEGATRON_GLUE_CONFIG``, then of ``--config``) < environment < command line. One
exception stands above all: ``MEGATRON_GLUE_DISABLE=1`` (and ``--no-accelerator``) turns the three optimisations off.
Offload of activations that was asked for by ``--activation-offload`` stays: it makes a model fit, and without the
double buffer it is the plain single-buffer way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megatron_glue.config.command_line import SOURCE, CommandLine, field_values, parse_command_line
from megatron_glue.config.environment import (
    CONFIG_NAME,
    DISABLE_NAME,
    RankEnvironment,
    environment_config_files,
    environment_overrides,
    is_disabled,
)
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import Override, field_specs, section_paths, value_to_word
from megatron_glue.config.sections import RunConfig, Section
from megatron_glue.config.yaml_files import read_yaml, to_yaml, unknown_key_remedy

SWITCHES = ("enable_metadata_cache", "enable_double_buffer", "enable_grouped_index")
"""The fields that switch the three optimisations."""


DEFAULT_RANKS_PER_NODE = 8


@dataclass(frozen=True)
class DryRun:
    """What ``--dry-run`` is to plan for.

    Attributes:
        world_size: Ranks.
        ranks_per_node: Ranks of one machine.
    """

    world_size: int
    ranks_per_node: int


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration and where it came from.

    Attributes:
        config: The configuration; its fields are checked, their combinations are not (``validation.py``).
        provenance: Field name -> ``default``, ``file X``, ``environment NAME`` or ``command line``.
        warnings: Lines for the user, e.g. flags that are accepted and not used.
        dry_run: Set if nothing is to be started.
    """

    config: RunConfig
    provenance: dict[str, str]
    warnings: list[str]
    dry_run: DryRun | None = None


def resolve_config(
    argv: Sequence[str],
    environ: Mapping[str, str],
    defaults: RunConfig,
    program: str | None = None,
    *,
    may_dry_run: bool = False,
) -> ResolvedConfig:
    """Merge everything a user can say into one configuration.

    Args:
        argv: Words behind the program's name.
        environ: The environment (``environment.read_environment()``).
        defaults: The entry point's own defaults.
        program: Name of the program in ``--help``; ``None`` takes it from the running script.
        may_dry_run: Whether the caller heeds ``ResolvedConfig.dry_run``; otherwise ``--dry-run`` is an error.

    Returns:
        The configuration with provenance and warnings.

    Raises:
        ConfigError: For anything that is unknown, does not parse or does not fit its field.
        SystemExit: With code 0 after ``--help``, ``--version`` and ``--print-config``.
    """
    command_line = parse_command_line(argv, defaults, program)
    overrides = [override for path in environment_config_files(environ) for override in read_yaml(path, CONFIG_NAME)]
    overrides += [override for path in command_line.config_files for override in read_yaml(path)]
    overrides += environment_overrides(environ)
    overrides += command_line.overrides
    overrides += _switches_off(is_disabled(environ), command_line.is_accelerator_off)
    chosen = {override.spec.name: override for override in overrides}
    config = _apply(defaults, overrides)
    provenance = {name: chosen[name].source if name in chosen else "default" for name in field_specs()}
    dry_run = _dry_run(command_line, environ, may_dry_run)
    if command_line.is_print_config:
        if RankEnvironment.from_mapping(environ).is_main:
            sys.stdout.write(to_yaml(config, provenance))
        raise SystemExit(0)
    warnings = list(command_line.notes)
    if command_line.ignored:
        warnings.append(f"accepted for Megatron-LM scripts and not used: {', '.join(command_line.ignored)}")
    return ResolvedConfig(config, provenance, warnings, dry_run)


def describe(resolved: ResolvedConfig) -> str:
    """Return one line per value that does not come from the defaults: flag, value and source."""
    lines = [
        f"{spec.flag} {value_to_word(spec, value)}  ({resolved.provenance[spec.name]})"
        for spec, value in field_values(resolved.config)
        if resolved.provenance[spec.name] != "default"
    ]
    return "\n".join(lines) or "all values are the defaults"


def as_dict(config: RunConfig) -> dict[str, Any]:
    """Return plain nested data for JSON, YAML or a checkpoint."""
    return config.model_dump(mode="json")


def from_dict(data: Mapping[str, Any]) -> RunConfig:
    """Build a configuration from what :func:`as_dict` returned; missing fields take their defaults.

    Args:
        data: Nested mappings by section and field name.

    Raises:
        ConfigError: For an unknown key or a value that does not fit.
    """
    return _apply(RunConfig(), list(_flatten(data, ())))


def _switches_off(by_environment: bool, by_flag: bool) -> list[Override]:
    """Return what turns the three optimisations off, or nothing."""
    if not (by_environment or by_flag):
        return []
    written = DISABLE_NAME if by_environment else "--no-accelerator"
    source = f"environment {DISABLE_NAME}" if by_environment else f"{SOURCE} {written}"
    return [Override(field_specs()[name], False, written, source) for name in SWITCHES]


def _dry_run(command_line: CommandLine, environ: Mapping[str, str], may_dry_run: bool) -> DryRun | None:
    """Return what a dry run is to plan for: what was said, else the ranks that a launcher started.

    Raises:
        ConfigError: If its flags are given without it, or it is asked for where it does not exist.
    """
    wanted = {"--world-size": command_line.world_size, "--ranks-per-node": command_line.ranks_per_node}
    if not command_line.is_dry_run:
        for flag, count in wanted.items():
            if count is not None:
                reason = "is for --dry-run; a run has the ranks that its launcher starts"
                raise ConfigError(flag, count, reason, "add --dry-run, or drop it")
        return None
    if not may_dry_run:
        raise ConfigError("--dry-run", "", "exists for the entry points only", "drop it, or use pretrain_gpt.py")
    ranks = RankEnvironment.from_mapping(environ)
    world_size = command_line.world_size or ranks.world_size
    as_launched = ranks.local_world_size if ranks.launcher else DEFAULT_RANKS_PER_NODE
    return DryRun(world_size, command_line.ranks_per_node or min(world_size, as_launched))


def _flatten(data: Mapping[str, Any], section: tuple[str, ...]) -> Iterable[Override]:
    for key, value in data.items():
        path = (*section, str(key))
        spec = field_specs().get(str(key))
        dotted = ".".join(path)
        if spec is not None and spec.path == path:
            yield Override(spec, tuple(value) if isinstance(value, list) else value, dotted, "file")
        elif path not in section_paths():
            raise ConfigError(dotted, value, "unknown key", unknown_key_remedy(path))
        elif isinstance(value, Mapping):
            yield from _flatten(value, path)
        else:
            raise ConfigError(dotted, value, "not a mapping of names to values", "give the fields of the section")


def _apply(defaults: RunConfig, overrides: Sequence[Override]) -> RunConfig:
    """Put overrides on defaults in order, checking every one of them, also those that a later one replaces."""
    values: dict[tuple[str, ...], Any] = {spec.path: value for spec, value in field_values(defaults)}
    for override in overrides:
        _check_alone(override)
        values[override.spec.path] = override.value
    return _build(RunConfig, (), values)


def _check_alone(override: Override) -> None:
    """Check one value against its field, so that the message can name what the user wrote."""
    section: type[Section] = RunConfig
    for name in override.spec.path[:-1]:
        annotation = section.model_fields[name].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, Section)
        section = annotation
    try:
        section.model_validate({override.spec.name: override.value})
    except ValidationError as error:
        raise override.spec.error(override.written, override.value) from error


def _build(section: type[Section], path: tuple[str, ...], values: Mapping[tuple[str, ...], Any]) -> Any:
    """Build a section and the sections in it from checked values."""
    arguments = {}
    for name, info in section.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            arguments[name] = _build(annotation, (*path, name), values)
        else:
            arguments[name] = values[(*path, name)]
    return section(**arguments)
