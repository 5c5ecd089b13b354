"""The command line: one flag per field, Megatron-LM's other flags, and the texts of ``--help`` and of flag errors.

It turns words into overrides in the order they were given. It decides no precedence (``loading.py`` does) and checks
no combination (``validation.py`` does).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megatron_glue import __version__
from megatron_glue.config import megatron_flags
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import FieldSpec, Override, field_specs, nearest, parse_words, value_to_word
from megatron_glue.config.sections import RunConfig

SOURCE = "command line"
DRY_RUN_COUNTS = ("--world-size", "--ranks-per-node")
MAX_RANKS = 1_000_000
METAVARS = {"int": "N", "float": "X", "str": "TEXT", "ints": "N", "strs": "TEXT"}


@dataclass
class CommandLine:
    """What the command line says, before it is merged with anything.

    Attributes:
        overrides: Values in the order they were given; a later one wins.
        config_files: YAML files in the order they were given.
        is_accelerator_off: Whether ``--no-accelerator`` was given.
        is_print_config: Whether ``--print-config`` was given.
        is_dry_run: Whether ``--dry-run`` was given.
        world_size: Ranks that a dry run is to plan for; ``None`` if it was not said.
        ranks_per_node: Likewise, ranks of one machine.
        ignored: Flags that are accepted and not used.
        notes: Translations that the user should be told about.
    """

    overrides: list[Override] = field(default_factory=list)
    config_files: list[str] = field(default_factory=list)
    is_accelerator_off: bool = False
    is_print_config: bool = False
    is_dry_run: bool = False
    world_size: int | None = None
    ranks_per_node: int | None = None
    ignored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def set(self, name: str, value: Any, written: str) -> None:
        """Append one value."""
        self.overrides.append(Override(field_specs()[name], value, written, SOURCE))


def parse_command_line(argv: Sequence[str], defaults: RunConfig, program: str | None = None) -> CommandLine:
    """Read the words of a command line.

    Args:
        argv: The words behind the program's name.
        defaults: What ``--help`` shows as defaults.
        program: Name of the program in ``--help``; ``None`` takes it from the running script.

    Returns:
        What they say.

    Raises:
        ConfigError: For an unknown flag, a word that does not fit, or a flag that cannot be honoured.
        SystemExit: With code 0 after ``--help`` and ``--version``.
    """
    parser = _build_parser(defaults, program)
    parsed = CommandLine()
    _, unknown = parser.parse_known_args(list(argv), namespace=_Namespace(parsed))
    for word in unknown:
        raise _unknown_word(word)
    return parsed


def known_flags() -> list[str]:
    """Return every flag that is accepted, Megatron-LM's included."""
    flags = ["--help", "--version", "--config", "--print-config", "--no-accelerator"]
    flags += ["--dry-run", *DRY_RUN_COUNTS]
    for spec in field_specs().values():
        flags += [spec.flag, *spec.off_flags]
    tables = (megatron_flags.TRANSLATED, megatron_flags.SATISFIED, megatron_flags.IGNORED, megatron_flags.REFUSED)
    return flags + [flag for table in tables for flag in table]


class _Namespace(argparse.Namespace):
    """Carries the result through argparse, whose actions can only write to a namespace."""

    def __init__(self, parsed: CommandLine) -> None:
        super().__init__()
        self.parsed = parsed


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are :class:`ConfigError`, and which prints no usage in front of them."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong, e.g. a flag without its value."""
        subject, _, reason = message.removeprefix("argument ").partition(": ")
        flag = subject if subject.startswith("-") else SOURCE
        raise ConfigError(flag, "", reason or message, "see --help")


class _Action(argparse.Action):
    """Base of the actions below: hands the words to ``apply``."""

    def __init__(self, option_strings: Sequence[str], dest: str, payload: Any = None, **keywords: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **keywords)
        self.payload = payload

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Receive one flag and its words from argparse."""
        words = [] if values is None else [values] if isinstance(values, str) else list(values)
        self.apply(namespace.parsed, option_string or self.option_strings[0], words)

    def apply(self, parsed: CommandLine, flag: str, words: list[str]) -> None:
        """Write one flag down."""
        setattr(parsed, self.dest, words[0] if words else True)


class _Append(_Action):
    """``--config``: every file counts."""

    def apply(self, parsed: CommandLine, flag: str, words: list[str]) -> None:
        """Append the file."""
        getattr(parsed, self.dest).extend(words)


class _CountAction(_Action):
    """A number of ranks, for ``--dry-run``."""

    def apply(self, parsed: CommandLine, flag: str, words: list[str]) -> None:
        """Write the number down."""
        text = words[0]
        if not (text.isascii() and text.isdigit() and 0 < int(text) <= MAX_RANKS):
            raise ConfigError(flag, text, f"not a whole number from 1 to {MAX_RANKS}", "give a number of ranks")
        setattr(parsed, self.dest, int(text))


class _FieldAction(_Action):
    """A flag with a value for one field."""

    def apply(self, parsed: CommandLine, flag: str, words: list[str]) -> None:
        """Append the value."""
        spec: FieldSpec = self.payload
        foreign = megatron_flags.FIELD_WORDS.get(spec.name, {})
        if len(words) == 1 and words[0] in foreign:
            meaning = foreign[words[0]]
            if spec.name in megatron_flags.APPROXIMATE_WORD_FIELDS:
                parsed.notes.append(f"{flag} {words[0]} is taken as {flag} {meaning}")
            words = [meaning]
        parsed.set(spec.name, parse_words(spec, words, flag), flag)


class _SwitchAction(_Action):
    """``--x`` or ``--no-x``."""

    def apply(self, parsed: CommandLine, flag: str, words: list[str]) -> None:
        """Append True or False."""
        spec: FieldSpec = self.payload
        parsed.set(spec.name, flag not in spec.off_flags, flag)


class _TranslatedAction(_Action):
    """A Megatron-LM flag that sets fields under other names."""

    def apply(self, parsed: CommandLine, flag: str, words: list[str]) -> None:
        """Append the fields it stands for."""
        translation: megatron_flags.Translation = self.payload
        word = words[0] if words else ""
        if word not in translation.words:
            raise ConfigError(flag, word, "not available here", f"use one of {', '.join(translation.words)}")
        for name, value in translation.words[word].items():
            parsed.set(name, value, flag)
            if translation.is_approximate:
                spec = field_specs()[name]
                parsed.notes.append(f"{flag} is taken as {spec.flag} {value_to_word(spec, value)}")


class _IgnoredAction(_Action):
    """A flag that is accepted and not used."""

    def apply(self, parsed: CommandLine, flag: str, words: list[str]) -> None:
        """Remember it for the warning, once."""
        if self.payload and flag not in parsed.ignored:
            parsed.ignored.append(flag)


class _RefusedAction(_Action):
    """A flag that would train something else if it were ignored."""

    def apply(self, parsed: CommandLine, flag: str, words: list[str]) -> None:
        """Say why not."""
        refusal: megatron_flags.Refusal = self.payload
        raise ConfigError(flag, " ".join(words) or "on", refusal.reason, refusal.remedy)


def _build_parser(defaults: RunConfig, program: str | None) -> _Parser:
    parser = _Parser(
        prog=program,
        usage="%(prog)s [--config FILE] [flags]",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Pretrain a language model on packed documents.\n\n"
            "A value comes from the command line, else from the environment (MEGATRON_GLUE_<FIELD>), else from the\n"
            "YAML file, else from the defaults shown here. MEGATRON_GLUE_DISABLE=1 turns every optimisation off."
        ),
        epilog=(
            "Megatron-LM's other flags are translated, accepted or refused with a reason.\n\n"
            "example:\n"
            "  torchrun --nproc-per-node 2 %(prog)s --num-layers 4 --hidden-size 256 \\\n"
            "      --use-packed-cache --double-buffer-ckpt --train-iters 100"
        ),
    )
    run = parser.add_argument_group("run")
    run.add_argument("--version", action="version", version=f"megatron_glue {__version__}")
    run.add_argument(
        "--config", dest="config_files", action=_Append, metavar="FILE", help="YAML file; a later file wins."
    )
    run.add_argument(
        "--print-config",
        dest="is_print_config",
        action=_Action,
        nargs=0,
        help="Print the resolved YAML, with the source of each value that is no default, and exit.",
    )
    run.add_argument(
        "--dry-run",
        dest="is_dry_run",
        action=_Action,
        nargs=0,
        help="Check everything that can be checked without starting, print the layout of the ranks, the memory that "
        "each needs and what would start, and exit; needs no GPU.",
    )
    run.add_argument(
        "--world-size",
        action=_CountAction,
        metavar="N",
        help="With --dry-run: plan for N ranks (default: those that the launcher started).",
    )
    run.add_argument(
        "--ranks-per-node",
        action=_CountAction,
        metavar="N",
        help="With --dry-run: ranks of one machine (default: as the launcher says, else at most 8).",
    )
    run.add_argument(
        "--no-accelerator",
        dest="is_accelerator_off",
        action=_Action,
        nargs=0,
        help="Turn the cache, the double buffer and one-pass grouping off, whatever else is said.",
    )
    values = {spec.name: value for spec, value in field_values(defaults)}
    groups: dict[str, Any] = {}
    for spec in field_specs().values():
        if spec.section not in groups:
            groups[spec.section] = parser.add_argument_group(f"{spec.section} (YAML section of the same name)")
        _add_field(groups[spec.section], spec, values[spec.name])
    _add_megatron_flags(parser)
    return parser


def field_values(config: RunConfig) -> list[tuple[FieldSpec, Any]]:
    """Return every field with its value, in the order of the sections."""
    values = []
    for spec in field_specs().values():
        value: Any = config
        for name in spec.path:
            value = getattr(value, name)
        values.append((spec, value))
    return values


def _add_field(group: Any, spec: FieldSpec, default: Any) -> None:
    text = f"{spec.doc} (default: {value_to_word(spec, default)})".replace("%", "%%")
    if spec.off_flags:
        group.add_argument(
            spec.flag, *spec.off_flags, dest=spec.name, action=_SwitchAction, nargs=0, payload=spec, help=text
        )
        return
    metavar = "{" + ",".join(spec.words) + "}" if spec.words else METAVARS[spec.kind]
    nargs = {"ints": "+", "strs": "*"}.get(spec.kind)
    group.add_argument(
        spec.flag, dest=spec.name, action=_FieldAction, nargs=nargs, metavar=metavar, payload=spec, help=text
    )


def _add_megatron_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that stand in no section, without a line in ``--help``."""

    def add(flag: str, action: type[_Action], num_values: int, payload: Any, dest: str = "megatron") -> None:
        nargs = {0: 0, 1: None}.get(num_values, num_values)
        parser.add_argument(flag, dest=dest, action=action, nargs=nargs, payload=payload, help=argparse.SUPPRESS)

    for flag, translation in megatron_flags.TRANSLATED.items():
        add(flag, _TranslatedAction, 0 if "" in translation.words else 1, translation)
    for flag, num_values in megatron_flags.SATISFIED.items():
        add(flag, _IgnoredAction, num_values, False)
    for flag, num_values in megatron_flags.IGNORED.items():
        add(flag, _IgnoredAction, num_values, True)
    for flag, refusal in megatron_flags.REFUSED.items():
        add(flag, _RefusedAction, refusal.num_values, refusal)


def _unknown_word(word: str) -> ConfigError:
    """Build the error for a word that no flag accepts."""
    if not word.startswith("-"):
        return ConfigError(SOURCE, word, "this word stands behind no flag", "see --help for the flags")
    flag, _, value = word.partition("=")
    by_field_name = {"--" + spec.name.replace("_", "-"): spec.flag for spec in field_specs().values()}
    spelled = flag.replace("_", "-")
    suggestion = by_field_name.get(spelled) or nearest(spelled, known_flags())
    remedy = f"did you mean {suggestion}?" if suggestion else "see --help for the flags"
    return ConfigError(flag, value, "unknown flag", remedy)
