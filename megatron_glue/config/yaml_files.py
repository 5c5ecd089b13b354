"""Configuration as YAML: reading a file into overrides, and writing a resolved configuration.

A file holds the sections by name, each a mapping of field names; ``training`` holds the ``accelerator`` block. Only
plain data is read: no tags, no objects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import FieldSpec, Override, field_specs, nearest, section_paths
from megatron_glue.config.sections import RunConfig


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads ``1e-3`` as a number, as YAML 1.2 does (PyYAML follows 1.1 and reads a text)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: str, named_by: str = "--config") -> list[Override]:
    """Read one file.

    Args:
        path: The file as the user wrote it.
        named_by: The flag or variable that names it, for the message.

    Returns:
        One override per key, with ``written`` naming file, line and key.

    Raises:
        ConfigError: When the file cannot be read, is no YAML, repeats a key, or holds an unknown key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(named_by, path, f"cannot be read: {reason}", "give the path of a YAML file") from error
    return list(_overrides(text, path))


def to_yaml(config: RunConfig, provenance: Mapping[str, str] | None = None) -> str:
    """Write every section with every field; reading it back gives an equal configuration.

    Args:
        config: What to write.
        provenance: Field name -> where its value came from; a comment then says so beside each value that is not a
            default. ``None`` writes no comments.
    """
    sections = config.model_dump(mode="json")
    if provenance is None:
        return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)
    return "\n".join([*_with_sources(sections, provenance, ""), ""])


def _with_sources(section: Mapping[str, Any], provenance: Mapping[str, str], indent: str) -> Iterator[str]:
    """Yield the lines of a section. No field is a mapping, so every mapping is a section."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _with_sources(value, provenance, indent + "  ")
            continue
        lines = yaml.safe_dump({name: value}, allow_unicode=True, width=math.inf).splitlines()
        source = provenance.get(name, "default")
        if source != "default":
            comment = "# " + "".join(letter if letter.isprintable() else "?" for letter in source)
            # Behind the first of several lines it might stand inside a quoted text.
            lines = [f"{lines[0]}  {comment}"] if len(lines) == 1 else [comment, *lines]
        yield from (indent + line for line in lines)


def _overrides(text: str, path: str) -> Iterator[Override]:
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is not None:
            yield from _section(loader, root, (), path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        problem = getattr(error, "problem", None) or "not a YAML document"
        raise ConfigError(f"{path}:{line}", "", f"not YAML: {problem}", "correct the line") from error
    except RecursionError as error:
        raise ConfigError(path, "", "nested too deeply", "settings are at most three levels deep") from error
    finally:
        if loader is not None:
            loader.dispose()


def _section(loader: _Loader, node: yaml.Node, section: tuple[str, ...], path: str) -> Iterator[Override]:
    """Yield the overrides of one mapping and of the sections in it."""
    where = f"{path}:{node.start_mark.line + 1}"
    name = ".".join(section) or "the document"
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
        return
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(where, name, "not a mapping of names to values", "write 'name: value' lines")
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value)
        dotted = ".".join((*section, key))
        if key in seen:
            raise ConfigError(f"{path}:{line}", dotted, f"already given in line {seen[key]}", "keep one of the two")
        seen[key] = line
        child = (*section, key)
        spec = field_specs().get(key)
        if spec is not None and spec.path == child:
            written = f"{path}:{line}: {dotted}"
            yield Override(spec, _value(loader, value_node, spec, written), written, f"file {path}")
        elif child in section_paths():
            yield from _section(loader, value_node, child, path)
        else:
            raise ConfigError(f"{path}:{line}", dotted, "unknown key", unknown_key_remedy(child))


def _value(loader: _Loader, node: yaml.Node, spec: FieldSpec, written: str) -> Any:
    """Construct a plain value of the field's kind; lists become tuples, whole floats and words stay what they are."""
    try:
        value = loader.construct_object(node, deep=True)
    except (ValueError, KeyError, OverflowError) as error:
        # An explicit tag, a date that is none, a number of 5,000 digits: PyYAML lets Python's own errors through.
        raise spec.error(written, str(node.value)[:40]) from error
    if isinstance(value, str) and "\0" in value:
        raise spec.error(written, ascii(value))
    if isinstance(value, list):
        return tuple(value)
    if spec.kind == "bool" and isinstance(value, str) and value in spec.words:
        return spec.words[value]
    if value is None and not spec.optional:
        raise spec.error(written, "null")
    return value


def unknown_key_remedy(path: tuple[str, ...]) -> str:
    """Suggest the key that was probably meant: the same name in its own section first, then a similar one.

    Args:
        path: Section names and key as written.
    """
    spec = field_specs().get(path[-1].replace("-", "_"))
    if spec is not None:
        return f"did you mean {spec.key}?"
    keys = [spec.key for spec in field_specs().values()] + [".".join(section) for section in section_paths()]
    suggestion = nearest(".".join(path), keys)
    return f"did you mean {suggestion}?" if suggestion else "see docs/configuration.md for the keys"
