import sys
import time

import numpy as np
import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import DataConfig
from megatron_glue.data.corpus import MAX_MODULES, find_modules, load_standard_library, split_source
from megatron_glue.data.documents import build_datasets
from megatron_glue.data.tokenizer import ByteTokenizer

SOURCE = '''"""Module text."""

import os


class Tree(
    object,
):
    """A tree."""

    height = 1

    def grow(self):
        """Grow."""
        def nested():
            return 1
        return nested()

    @property
    @other
    def leaf(self):
        return os

    class Inner:
        pass


CONSTANT = 3
SECOND = 4

async def wait():
    text = """
    def not_a_document
    """
    return text

if CONSTANT:
    def chosen():
        return 1
else:
    def chosen():
        return 2
'''


def test_a_module_is_cut_into_functions_methods_class_heads_and_module_text():
    documents = list(split_source(SOURCE))
    first_lines = [text.split("\n", 1)[0] for text in documents]
    assert first_lines == [
        '"""Module text."""',
        "class Tree(",
        "def grow(self):",
        "@property",
        "class Inner:",
        "CONSTANT = 3",
        "async def wait():",
        "if CONSTANT:",
        "def chosen():",
        "else:",
        "def chosen():",
    ]
    assert (
        documents[2] == 'def grow(self):\n    """Grow."""\n    def nested():\n        return 1\n    return nested()\n'
    )
    assert documents[3] == "@property\n@other\ndef leaf(self):\n    return os\n"
    assert "not_a_document" in documents[6]


def test_the_cuts_are_disjoint_and_complete():
    words = " ".join(split_source(SOURCE)).split()
    assert words == SOURCE.split()


def test_the_embedded_corpus_is_large_skewed_and_in_a_fixed_order():
    texts = load_standard_library()
    assert len(texts) >= 5000
    lengths = np.array([len(text) for text in texts])
    assert lengths.mean() > 1.5 * np.median(lengths)
    assert lengths.max() > 20 * lengths.mean()
    load_standard_library.cache_clear()
    begin = time.process_time()
    assert load_standard_library() == texts
    # About 0.35 s on one core; the bound leaves room for a loaded machine.
    assert time.process_time() - begin < 5.0


def test_a_second_load_comes_from_memory():
    assert load_standard_library() is load_standard_library()


def test_held_out_documents_have_no_near_copy_in_training():
    """An independent measure: the share of a held-out document's 8-word runs that stand in any training document."""
    train, heldout = build_datasets(DataConfig(), ByteTokenizer(), 1234)
    assert train.num_documents + heldout.num_documents == len(load_standard_library())

    def runs(documents, index):
        words = bytes(documents.document(index)[:-1].astype(np.uint8)).split()
        return {hash(tuple(words[at : at + 8])) for at in range(len(words) - 7)}

    trained = set()
    for index in range(train.num_documents):
        trained |= runs(train, index)
    shares = [
        len(mine & trained) / len(mine) for index in range(heldout.num_documents) if (mine := runs(heldout, index))
    ]
    assert len(shares) > 150
    assert np.mean(shares) < 0.1
    assert np.mean(np.array(shares) > 0.7) < 0.03


def test_modules_are_bounded_sorted_and_of_the_standard_library_only(tmp_path):
    for name in (
        "json/decoder.py",
        "json/tests/case.py",
        "ast.py",
        "test/ast.py",
        "stranger.py",
        "site-packages/re.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    assert [path.relative_to(tmp_path).as_posix() for path in find_modules(tmp_path)] == ["ast.py", "json/decoder.py"]
    package = tmp_path / "email"
    package.mkdir()
    for index in range(MAX_MODULES + 5):
        (package / f"m{index}.py").touch()
    assert len(find_modules(tmp_path)) == MAX_MODULES


def test_python_without_source_is_one_clear_error(tmp_path):
    zipped = tmp_path / f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    zipped.write_bytes(b"PK")
    for root in (zipped, tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match=r"no source of its standard library.*--data-path") as caught:
            load_standard_library(root)
        assert caught.value.field == "--data-path"


def test_unreadable_modules_are_left_out(tmp_path):
    (tmp_path / "ast.py").write_bytes(b"# \xff\xfe not UTF-8, and long enough to be a document\n")
    (tmp_path / "bisect.py").write_text("def bisect(values, wanted):\n    return 0\n")
    assert load_standard_library(tmp_path) == ("def bisect(values, wanted):\n    return 0\n",)
