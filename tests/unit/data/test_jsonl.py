import gzip
import json
import os
import threading

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.data.jsonl import read_texts


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_texts_come_in_the_order_of_files_and_lines(tmp_path):
    first = write(tmp_path / "a.jsonl", '{"text": "one"}\n\n  \n{"text": "zwei \\u00e4", "id": 3}')
    second = write(tmp_path / "b.jsonl", '\ufeff{"text": ""}\r\n{"text": "three"}\r\n')
    assert list(read_texts([first, second], "text")) == ["one", "zwei ä", "", "three"]
    assert list(read_texts([second], "text")) == ["", "three"]


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl"])
def test_gzip_is_recognised_by_content(tmp_path, name):
    path = write(tmp_path / name, gzip.compress(b'{"body": "packed"}\n'))
    assert list(read_texts([path], "body")) == ["packed"]


def test_a_pipe_can_be_read(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(gzip.compress(b'{"text": "through"}\n'),))
    writer.start()
    assert list(read_texts([str(path)], "text")) == ["through"]
    writer.join()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not valid JSON"),
        (b"plain words", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'["text"]', "is a JSON list, not an object"),
        (b"null", "is a JSON NoneType, not an object"),
        (b'{"body": "x"}', r"has no key 'text' \(keys: body\)"),
        (b"{}", r"has no key 'text' \(keys: none\)"),
        (b'{"text": 5}', "'text' is a int, not a string"),
        (b'{"text": null}', "'text' is a NoneType, not a string"),
        (b'{"text": "\xff"}', "not UTF-8 at byte 11"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path, line, reason):
    path = write(tmp_path / "bad.jsonl", b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(ConfigError, match=reason) as caught:
        list(read_texts([path], "text"))
    assert caught.value.field == "--data-path"
    assert caught.value.value == f"{path}, line 3"


@pytest.mark.parametrize("content", [b"", b"\n  \n", gzip.compress(b"")])
def test_a_file_without_documents_is_an_error(tmp_path, content):
    path = write(tmp_path / "empty.jsonl", content)
    with pytest.raises(ConfigError, match=r"empty\.jsonl: holds no documents"):
        list(read_texts([path], "text"))


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.jsonl: cannot be read \(No such file"):
        list(read_texts([str(tmp_path / "gone.jsonl")], "text"))
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory"):
        list(read_texts([str(tmp_path)], "text"))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "header", "checksum"])
def test_damaged_gzip_is_named(tmp_path, damage):
    lines = "".join(json.dumps({"text": os.urandom(40).hex()}) + "\n" for _ in range(4000)).encode()
    packed = bytearray(gzip.compress(lines))
    if damage == "truncated":
        packed = packed[: len(packed) // 2]
    elif damage == "flipped":
        packed[len(packed) // 2 : len(packed) // 2 + 64] = bytes(64)
    elif damage == "header":
        packed[10] = 0xFF  # a kind of block that does not exist
    else:
        packed[-6] ^= 1
    path = write(tmp_path / "cut.gz", bytes(packed))
    with pytest.raises(ConfigError, match=r"cut\.gz, (after line \d+: the gzip data is damaged|line \d+: not)"):
        list(read_texts([path], "text"))
