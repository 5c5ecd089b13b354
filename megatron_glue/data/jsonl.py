"""Reads a user's own documents: JSON Lines files, plain or gzip, one object with a text per line.

Lines are read one at a time, so a file may be larger than memory. Whatever is wrong with a file is said with its name
and line number. It does not tokenize or split.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_glue.config.errors import ConfigError

_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"


def read_texts(paths: Sequence[str], key: str) -> Iterator[str]:
    """Read documents in the order of files and lines.

    Args:
        paths: JSON Lines files; gzip is recognised by content, whatever the name.
        key: Key of the text in each line's object.

    Yields:
        The texts, empty ones included. Blank lines are allowed and yield nothing.

    Raises:
        ConfigError: On a missing or unreadable file, a file without documents, or a line that is not UTF-8, not a
            JSON object, has no ``key`` or has one that is not a string. File and line are named.
    """
    for path in paths:
        num_documents = 0
        for number, line in _numbered_lines(path):
            if line.strip():
                yield _text_of_line(line, key, f"{path}, line {number}")
                num_documents += 1
        if num_documents == 0:
            raise _data_error(path, "holds no documents", "remove it from --data-path or fill it")


def _numbered_lines(path: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with Path(path).open("rb") as file, _unzipped(file) as lines:
            for number, line in enumerate(lines, start=1):
                yield number, line.removeprefix(_UTF8_MARK) if number == 1 else line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        where = f"{path}, after line {number}"
        raise _data_error(where, f"the gzip data is damaged or cut off ({error})", "copy the file again") from error
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error})"
        raise _data_error(path, reason, "check the path and its permissions") from error


def _unzipped(file: io.BufferedReader) -> io.BufferedIOBase:
    # A look ahead instead of a seek, so that a pipe can be read too.
    return gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == _GZIP_MAGIC else file


def _text_of_line(line: bytes, key: str, where: str) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _data_error(where, f"not UTF-8 at byte {error.start + 1} of the line", "save it as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise _data_error(where, f"not valid JSON ({error})", "write one JSON object per line") from error
    if not isinstance(record, dict):
        raise _data_error(where, f"is a JSON {type(record).__name__}, not an object", f'write {{"{key}": "..."}}')
    if key not in record:
        keys = ", ".join(sorted(record)[:8]) or "none"
        raise _data_error(where, f"has no key {key!r} (keys: {keys})", "name the key with --json-key")
    text = record[key]
    if not isinstance(text, str):
        raise _data_error(where, f"{key!r} is a {type(text).__name__}, not a string", "name another --json-key")
    return text


def _data_error(where: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError("--data-path", where, reason, remedy)
