"""Every setting of a run as one flat entry: its flag, its environment name, and how words become its value.

Derived from the sections, so that a new field needs no line anywhere else. It merges nothing and reads neither a file
nor the environment; ``command_line.py``, ``environment.py`` and ``yaml_files.py`` do that with these entries.
"""

from __future__ import annotations

import ast
import difflib
import functools
import math
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import MAX_COUNT, RunConfig, Section

ENVIRONMENT_PREFIX = "MEGATRON_GLUE_"
TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")
MAX_LIST_ENTRIES = 10_000


@dataclass(frozen=True)
class FieldSpec:
    """One setting.

    Attributes:
        path: Section names and field name, e.g. ``("training", "accelerator", "cache_scope")``.
        kind: What its value is: ``ints`` is a whole number or a tuple of them, ``strs`` a tuple of strings.
        default: Value in a plain ``RunConfig()``.
        doc: Meaning, unit and off-value.
        optional: Whether ``None`` is a value.
        flag: Long flag name with dashes in front.
        off_flags: Flags that set a boolean to False.
        words: Words a flag accepts and the value each stands for (choices map to themselves).
        bounds: Condition on a number in words, or empty.
    """

    path: tuple[str, ...]
    kind: Literal["bool", "int", "float", "str", "choice", "ints", "strs"]
    default: Any
    doc: str
    optional: bool
    flag: str
    off_flags: tuple[str, ...] = ()
    words: dict[str, Any] = field(default_factory=dict)
    bounds: str = ""

    @property
    def name(self) -> str:
        """Field name; unique over all sections."""
        return self.path[-1]

    @property
    def key(self) -> str:
        """Dotted YAML key."""
        return ".".join(self.path)

    @property
    def section(self) -> str:
        """Dotted name of the section the field stands in."""
        return ".".join(self.path[:-1])

    @property
    def environment_name(self) -> str:
        """Environment variable that sets the field."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def expected(self) -> str:
        """What a value must be, in words that fit after 'not'."""
        if self.words:
            return "one of " + ", ".join(self.words)
        nouns = {"bool": "true or false", "int": "a whole number", "float": "a finite number", "str": "a text"}
        nouns |= {"ints": "a whole number", "strs": "a list of texts"}
        noun = f"{nouns[self.kind]} {self.bounds}".rstrip()
        return f"{noun}, or a list of whole numbers" if self.kind == "ints" else noun

    def error(self, written: str, value: object) -> ConfigError:
        """Build the error for a value that does not fit.

        Args:
            written: The flag, key or variable as the user wrote it.
            value: The value as the user wrote it.
        """
        default = "unset" if self.default is None else value_to_word(self, self.default)
        return ConfigError(written, value, f"not {self.expected}", f"give one (default: {default})")


@dataclass(frozen=True)
class Override:
    """One value that a user gave for one field.

    Attributes:
        spec: The field.
        value: Its value, already of the field's kind (bounds are checked when sections are built).
        written: The flag, key or variable as the user wrote it.
        source: Where it stands: ``file X``, ``environment NAME`` or ``command line``.
    """

    spec: FieldSpec
    value: Any
    written: str
    source: str


@functools.cache
def field_specs() -> dict[str, FieldSpec]:
    """Return all fields of :class:`RunConfig` by name, in the order of the sections."""
    specs: dict[str, FieldSpec] = {}
    for spec in _walk(RunConfig, ()):
        assert spec.name not in specs, f"field name {spec.name!r} stands in two sections; flat flags need unique names"
        specs[spec.name] = spec
    return specs


@functools.cache
def section_paths() -> frozenset[tuple[str, ...]]:
    """Return the names of all sections, nested ones with the names of those around them."""
    return frozenset(spec.path[:depth] for spec in field_specs().values() for depth in range(1, len(spec.path)))


def flag_of(name: str) -> str:
    """Return the flag that sets a field, for messages."""
    return field_specs()[name].flag


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name most similar to ``name``, or an empty string when none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), "")


def parse_words(spec: FieldSpec, words: Sequence[str], written: str) -> Any:
    """Turn the words of a flag or a variable into a value of the field's kind.

    Args:
        spec: The field.
        words: At least one word, except for ``strs``. Lists may be given as ``0 1 1``, ``[0,1,1]`` or in Megatron-LM's
            way as ``([0]*1+[1]*2)``; nothing is evaluated.
        written: The flag or variable, for the message.

    Raises:
        ConfigError: When the words are no such value.
    """
    text = " ".join(words)
    try:
        if spec.optional and spec.kind != "str" and text.lower() == "none":
            return None
        return _parse_kind(spec, words, text)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise spec.error(written, text) from error


def value_to_word(spec: FieldSpec, value: Any) -> str:
    """Return a value as a user would write it behind the flag."""
    if spec.kind == "bool" and spec.words:
        return next(word for word, meaning in spec.words.items() if meaning is value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(str(entry) for entry in value) or "empty"
    return "unset" if value is None else str(value)


def _parse_kind(spec: FieldSpec, words: Sequence[str], text: str) -> Any:
    """Parse by kind; ValueError or SyntaxError when the words do not fit."""
    if text in spec.words:
        return spec.words[text]
    match spec.kind:
        case "bool":
            return parse_switch(text)
        case "int":
            return int(text)
        case "float":
            return _finite(float(text))
        case "str":
            return text
        case "strs":
            return tuple(words)
        case "ints":
            return int(text) if len(words) == 1 and text.lstrip("+-").isdigit() else _parse_list(words)
        case "choice":
            raise ValueError(text)


def parse_switch(text: str) -> bool:
    """Turn 1/true/yes/on and 0/false/no/off into a boolean.

    Raises:
        ValueError: For any other word.
    """
    if text.lower() in TRUE_WORDS:
        return True
    if text.lower() in FALSE_WORDS:
        return False
    raise ValueError(text)


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(number)
    return number


def _parse_list(words: Sequence[str]) -> tuple[int, ...]:
    """Parse ``0 1 1``, ``0,1,1``, ``[0,1,1]`` and sums and repetitions of bracketed lists."""
    if len(words) > 1:
        return tuple(int(word.strip(",")) for word in words)
    value = _list_value(ast.parse(words[0].strip(), mode="eval").body)
    if not isinstance(value, list):
        raise ValueError(words[0])
    return tuple(value)


def _list_value(node: ast.expr) -> int | list[int]:
    """Read the few expressions that describe a list; everything else is a ValueError."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            numbers = [_list_value(entry) for entry in entries]
            if any(isinstance(number, list) for number in numbers):
                raise ValueError("nested list")
            return numbers  # pyright: ignore[reportReturnType]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _list_value(left), _list_value(right)
            if isinstance(first, list) and isinstance(second, list):
                return _bounded(first + second)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _list_value(left), _list_value(right)
            if isinstance(first, int) and isinstance(second, list):
                first, second = second, first
            if isinstance(first, list) and isinstance(second, int) and len(first) * second <= MAX_LIST_ENTRIES:
                return first * second
    raise ValueError("not a list")


def _bounded(numbers: list[int]) -> list[int]:
    if len(numbers) > MAX_LIST_ENTRIES:
        raise ValueError("too long")
    return numbers


def _walk(section: type[Section], path: tuple[str, ...]) -> Iterable[FieldSpec]:
    """Yield the fields of a section and of the sections in it."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from _walk(info.annotation, (*path, name))
        else:
            yield _spec((*path, name), info)


def _spec(path: tuple[str, ...], info: FieldInfo) -> FieldSpec:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    leaves, choices, limits = _leaves(info.annotation)
    limits = [*limits, *info.metadata]
    words: dict[str, Any] = {choice: choice for choice in choices}
    words.update(extra.get("values", {}))  # pyright: ignore[reportCallIssue, reportArgumentType]
    flag_name = str(extra.get("flag", path[-1])).replace("_", "-")
    kind = _kind(leaves, bool(choices))
    off_flags: tuple[str, ...] = ()
    if kind == "bool" and not words:
        off_flags = (f"--no-{flag_name}",)
        if "off_flag" in extra:
            off_flags += ("--" + str(extra["off_flag"]).replace("_", "-"),)
    return FieldSpec(
        path=path,
        kind=kind,
        default=info.get_default(),
        doc=info.description or "",
        optional=type(None) in leaves,
        flag=f"--{flag_name}",
        off_flags=off_flags,
        words=words,
        bounds=_bounds(limits),
    )


def _leaves(annotation: Any) -> tuple[set[Any], list[str], list[Any]]:
    """Return the plain types, the literal choices and the limits that an annotation is made of."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        leaves, choices, limits = _leaves(arguments[0])
        own = [
            entry for extra in arguments[1:] for entry in (extra.metadata if isinstance(extra, FieldInfo) else [extra])
        ]
        return leaves, choices, limits + own
    if origin in (Union, types.UnionType):
        parts = [_leaves(argument) for argument in arguments]
        return (
            set().union(*(part[0] for part in parts)),
            [choice for part in parts for choice in part[1]],
            [limit for part in parts for limit in part[2]],
        )
    if origin is Literal:
        return {str}, list(arguments), []
    return {annotation}, [], []


def _kind(leaves: set[Any], has_choices: bool) -> Any:
    """Name the kind of a field from its plain types."""
    plain = leaves - {type(None)}
    if has_choices:
        return "choice"
    if plain == {int, tuple[int, ...]}:
        return "ints"
    kinds = {bool: "bool", int: "int", float: "float", str: "str", tuple[str, ...]: "strs"}
    assert len(plain) == 1, f"a field of types {plain} has no flag"
    return kinds[plain.pop()]


def _bounds(limits: Iterable[Any]) -> str:
    """Put the limits of a number into words; the one that only keeps integers in their type goes without saying."""
    phrases = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    found = [
        f"{phrase} {getattr(limit, attribute)}"
        for limit in limits
        for attribute, phrase in phrases.items()
        if getattr(limit, attribute, None) not in (None, MAX_COUNT)
    ]
    return " and ".join(found)
