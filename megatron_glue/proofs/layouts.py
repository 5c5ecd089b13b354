"""Reads lists of layouts for the tools that compare them: a YAML file of models and of flags for each layout.

    base: --seq-length 128 --global-batch-size 8
    models:
      dense: --num-layers 4
      moe: --num-layers 4 --num-experts 8
    layouts:
      - {name: tp 2, world_size: 2, flags: --tensor-model-parallel-size 2}
      - {name: ep 2, world_size: 2, flags: --expert-model-parallel-size 2, models: [moe]}

Flags are those of the entry points, so that a line of a launch script can be tried as it stands. This file starts no
process and builds no model; whether a layout fits its model is found out by ``config/validation.py``.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import nearest

FLAG = "--layouts"
SWITCHES = ("both", "on", "off")


@dataclass(frozen=True)
class Layout:
    """One way of dividing the work.

    Attributes:
        name: For people.
        world_size: Number of ranks.
        flags: Words that make the layout, as on the command line.
        models: Names of the models that it is tried with.
        optimisations: Whether it is tried with the three optimisations ``on``, ``off`` or ``both``.
        requires: Module without which it cannot run; empty for none.
        quick_models: Those of its models with which it belongs to the short list.
    """

    name: str
    world_size: int
    flags: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    optimisations: str = "both"
    requires: str = ""
    quick_models: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayoutList:
    """A file of layouts.

    Attributes:
        models: Name of each model -> its flags, those of all models first.
        layouts: What to try, in order.
    """

    models: dict[str, tuple[str, ...]]
    layouts: tuple[Layout, ...]

    def flags_of(self, model: str) -> tuple[str, ...]:
        """Flags of a model, as ``--model`` names it.

        Raises:
            ConfigError: If there is none of that name.
        """
        if model not in self.models:
            raise ConfigError("--model", model, f"not in the file of {FLAG}", f"use {', '.join(self.models)}")
        return self.models[model]

    def find(self, name: str, flag: str) -> Layout:
        """A layout by its name.

        Args:
            name: As the user wrote it.
            flag: Where.

        Raises:
            ConfigError: If there is none of that name.
        """
        for layout in self.layouts:
            if layout.name == name:
                return layout
        suggestion = nearest(name, [layout.name for layout in self.layouts])
        remedy = f"did you mean {suggestion!r}?" if suggestion else "see python tools/parity.py --list"
        raise ConfigError(flag, name, f"not in the file of {FLAG}", remedy)


def read_layouts(path: str | Path) -> LayoutList:
    """Read a file.

    Args:
        path: The file as the user wrote it.

    Returns:
        Its models and layouts.

    Raises:
        ConfigError: When it cannot be read, is no YAML, or holds what no layout has.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(FLAG, path, f"cannot be read: {reason}", "give the path of a YAML file") from error
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "not a YAML document"
        raise ConfigError(
            f"{path}:{mark.line + 1 if mark else 1}", "", f"not YAML: {problem}", "correct the line"
        ) from error
    return _Reader(str(path)).read(data)


class _Reader:
    """Checks what YAML made of a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def read(self, data: Any) -> LayoutList:
        """Turn the whole document into layouts."""
        root = self._mapping(data, "the document", ("base", "models", "layouts"))
        base = self._words(root.get("base"), "base")
        named = self._mapping(root.get("models") or {"model": ""}, "models")
        models = {str(name): base + self._words(flags, f"models.{name}") for name, flags in named.items()}
        entries = root.get("layouts")
        if not isinstance(entries, list) or not entries:
            raise self._error("layouts", entries, "no list of layouts", "give at least one, each with name and flags")
        layouts = tuple(self._layout(entry, f"layouts[{index}]", tuple(models)) for index, entry in enumerate(entries))
        seen: set[str] = set()
        for index, layout in enumerate(layouts):
            if layout.name in seen:
                raise self._error(f"layouts[{index}].name", layout.name, "given twice", "name layouts differently")
            seen.add(layout.name)
        return LayoutList(models, layouts)

    def _layout(self, entry: Any, where: str, models: tuple[str, ...]) -> Layout:
        keys = ("name", "world_size", "flags", "models", "optimisations", "requires", "quick")
        values = self._mapping(entry, where, keys)
        name, world_size = values.get("name"), values.get("world_size")
        if not isinstance(name, str) or not name:
            raise self._error(f"{where}.name", name, "not a text", "name the layout")
        if not isinstance(world_size, int) or isinstance(world_size, bool) or not 1 <= world_size <= 1024:
            raise self._error(f"{where}.world_size", world_size, "not a number of ranks", "give 1 or more")
        chosen = values.get("models", list(models))
        if not isinstance(chosen, list) or not chosen or any(model not in models for model in chosen):
            raise self._error(f"{where}.models", chosen, "not a list of models of this file", f"use {list(models)}")
        # Bare on and off are truths in YAML 1.1.
        switches = values.get("optimisations", "both")
        if isinstance(switches, bool):
            switches = "on" if switches else "off"
        if switches not in SWITCHES:
            raise self._error(f"{where}.optimisations", switches, "unknown", f"use {', '.join(SWITCHES)}")
        return Layout(
            name=name,
            world_size=world_size,
            flags=self._words(values.get("flags"), f"{where}.flags"),
            models=tuple(chosen),
            optimisations=switches,
            requires=str(values.get("requires") or ""),
            quick_models=self._quick_models(values.get("quick", False), tuple(chosen), where),
        )

    def _quick_models(self, value: Any, models: tuple[str, ...], where: str) -> tuple[str, ...]:
        if isinstance(value, bool):
            return models if value else ()
        if not isinstance(value, list) or any(model not in models for model in value):
            raise self._error(f"{where}.quick", value, "neither yes nor a list of the layout's models", "use true")
        return tuple(value)

    def _mapping(self, value: Any, where: str, keys: Iterable[str] | None = None) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self._error(where, value, "not a mapping of names to values", "see docs/parity.md for the form")
        unknown = [str(key) for key in value if keys is not None and key not in keys]
        if unknown:
            suggestion = nearest(unknown[0], list(keys or ()))
            remedy = f"did you mean {suggestion}?" if suggestion else f"use {', '.join(keys or ())}"
            raise self._error(f"{where}.{unknown[0]}", value[unknown[0]], "unknown key", remedy)
        return value

    def _words(self, value: Any, where: str) -> tuple[str, ...]:
        if value is None:
            return ()
        if not isinstance(value, str):
            raise self._error(where, value, "not a text of flags", "write them as on a command line")
        try:
            return tuple(shlex.split(value))
        except ValueError as error:
            raise self._error(where, value, f"not a command line: {error}", "close the quotation") from error

    def _error(self, where: str, value: Any, reason: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self._path}: {where}", value, reason, remedy)
