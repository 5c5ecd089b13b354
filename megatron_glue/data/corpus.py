"""The embedded corpus: the running Python's own standard library, read in place.

It makes a first run possible without a download: every module is cut into its functions, methods, class heads and
module texts. The cuts are disjoint, so no line stands in two documents, and near-identical documents are dropped, so
that a held-out loss is honest. It does not tokenize, shuffle or split. Another Python version has another corpus; the
data fingerprint in checkpoints notices that.
"""

from __future__ import annotations

import functools
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from megatron_glue.config.errors import ConfigError
from megatron_glue.data.near_duplicates import drop_near_duplicates

MAX_MODULES = 600
MIN_DOCUMENT_CHARACTERS = 24
# Tests and demos of the library, vendored code, and modules that are mostly tables.
SKIPPED_NAMES = frozenset(
    {"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "ensurepip", "pydoc_data", "encodings"}
)

# A statement in the first column, or an indented definition: the only lines at which a document may begin.
_CANDIDATE_LINE = re.compile(r"^(?:(?P<indent>[ \t]+)(?=@|def |class |async def )|(?=[A-Za-z_@]))", re.MULTILINE)
_DEFINITION = re.compile(r"(?:async )?def |class |@")


def split_source(source: str) -> Iterator[str]:
    """Cut the text of one module into disjoint documents.

    Lines are looked at, not syntax trees: parsing the library would take two seconds in every rank, and a rare wrong
    cut inside a string does no harm to a training text.

    Args:
        source: Text of a Python module.

    Yields:
        Functions, methods (their indentation removed), class heads with their docstring, and what stands between
        them. Nested functions stay in their function. Blank lines around a document are removed.
    """
    begin, begin_indent = 0, ""
    in_function, after_decorator = False, False
    member_indent: str | None = None  # of the methods in the class, or the definitions in the statement, being read
    for match in _CANDIDATE_LINE.finditer(source):
        indent = match["indent"] or ""
        definition = _DEFINITION.match(source, match.end())
        keyword = definition.group() if definition else ""
        continues = after_decorator and keyword != "" and indent == begin_indent
        if continues:
            begins = False
        elif indent:
            begins = not in_function and indent == (member_indent or indent)
        else:
            begins = keyword != "" or in_function or member_indent is not None
        if begins:
            yield _cut(source, begin, match.start(), begin_indent)
            begin, begin_indent = match.start(), indent
        if begins or continues:
            after_decorator = keyword == "@"
            in_function = in_function if indent else keyword.endswith("def ")
            member_indent = indent or None
    yield _cut(source, begin, len(source), begin_indent)


def _cut(source: str, begin: int, end: int, indent: str) -> str:
    text = source[begin:end]
    if indent:
        text = ("\n" + text).replace("\n" + indent, "\n")
    return text.strip("\n") + "\n"


def find_modules(root: Path) -> list[Path]:
    """List the source files of the standard library under ``root`` in a fixed order (by path), at most MAX_MODULES."""
    found = []
    for entry in sorted(root.iterdir(), key=lambda path: path.name) if root.is_dir() else ():
        if entry.name in SKIPPED_NAMES or entry.stem not in sys.stdlib_module_names:
            continue
        if entry.suffix == ".py":
            found.append(entry)
        elif entry.is_dir():
            found.extend(
                path for path in entry.rglob("*.py") if SKIPPED_NAMES.isdisjoint(path.parts[len(root.parts) :])
            )
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())[:MAX_MODULES]


@functools.lru_cache(maxsize=2)
def load_standard_library(root: Path | None = None) -> tuple[str, ...]:
    """Read the embedded corpus.

    Args:
        root: Folder of the standard library; ``None`` means the running Python's. The result stays in memory, so
            that a second call costs nothing.

    Returns:
        Documents in a fixed order, without near-identical ones.

    Raises:
        ConfigError: If this Python comes without readable source (zipped, frozen or stripped).
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    texts: list[str] = []
    for path in find_modules(folder):
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        texts.extend(text for text in split_source(source) if len(text) >= MIN_DOCUMENT_CHARACTERS)
    if not texts:
        raise ConfigError(
            "--data-path",
            "(embedded corpus)",
            f"this Python has no source of its standard library in {folder} (zipped, frozen or stripped)",
            "give a JSONL file with --data-path, or use a Python with its .py files",
        )
    return tuple(drop_near_duplicates(texts))
