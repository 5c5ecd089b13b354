"""``meta.json``: what it must look like, whoever reads it.

A checksum says that bytes are those that were written, not that they make sense: a file may be written by hand, by a
tool, or to harm. All else that reads facts relies on what is checked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_glue.config.errors import ConfigError
from megatron_glue.training.checkpoint.files import CheckpointError

_MAX_REASON = 300
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Part(BaseModel):
    """Values of JSON are taken as they are: no text for a number. What is not named may be there, too."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Counters(_Part):
    losses: list[float] = []


class _Model(_Part):
    num_experts: _Count = 0
    moe_layers: list[bool | int] = []


class _Facts(_Part):
    version: str
    torch: str
    step: _Count
    layout: str
    num_skipped_updates: _Count
    counters: _Counters
    data_position: dict[str, Any]
    model: _Model
    config: dict[str, Any]
    provenance: dict[str, str]
    decisions: dict[str, dict[str, Any]] = {}
    origin: dict[str, Any] | None = None


def check_facts(facts: Any, file: Path) -> None:
    """Refuse facts that lack something or have it in another kind.

    Args:
        facts: Content of ``meta.json``.
        file: Where it stands, for the message.

    Raises:
        CheckpointError: Naming the file and the first entry that is wrong.
    """
    try:
        _Facts.model_validate(facts)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        entry = ".".join(map(str, first["loc"])) or "content"
        raise CheckpointError(f"{file}: damaged, {entry[:_MAX_REASON]!r}: {first['msg']}") from error


@contextmanager
def damage_named(file: Path) -> Iterator[None]:
    """Turn what Python raises about values that make no sense into one line with the file that they come from.

    Args:
        file: The file.

    Raises:
        CheckpointError: Instead of such an error; a ``ConfigError`` is about the user's own values and passes.
    """
    try:
        yield
    except ConfigError:
        raise
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{file}: damaged, {reason[:_MAX_REASON]}") from error
