import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import DataConfig
from megatron_glue.data.documents import DocumentSet, build_datasets, split_heldout, tokenize_documents
from megatron_glue.data.tokenizer import ByteTokenizer
from tests.support.data_cases import documents_of_lengths

TOKENIZER = ByteTokenizer()


class NoEodTokenizer(ByteTokenizer):
    eod_id = None


def contents(documents: DocumentSet) -> list[bytes]:
    return [documents.document(index).tobytes() for index in range(documents.num_documents)]


def jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_f85_lengths_are_taken_after_eod_was_appended():
    texts = ["first ä", "second"]
    documents = tokenize_documents(texts, TOKENIZER)
    assert documents.lengths.tolist() == [len(text.encode()) + 1 for text in texts]
    for index, text in enumerate(texts):
        ids = documents.document(index)
        assert ids[-1] == TOKENIZER.eod_id
        assert TOKENIZER.decode(ids[:-1]) == text
    without = tokenize_documents(texts, TOKENIZER, append_eod=False)
    assert [TOKENIZER.decode(without.document(index)) for index in range(2)] == texts
    assert without.num_tokens == documents.num_tokens - 2


def test_f87_a_tokenizer_without_eod_fails_before_any_text_is_read_and_only_if_eod_was_asked_for():
    read = []

    def texts():
        read.append(1)
        yield "text"

    with pytest.raises(ConfigError, match=r"--tokenizer-type=.*no end-of-document id"):
        tokenize_documents(texts(), NoEodTokenizer())
    assert not read
    assert tokenize_documents(texts(), NoEodTokenizer(), append_eod=False).lengths.tolist() == [4]
    with pytest.raises(ConfigError, match=r"--tokenizer-type=.*no end-of-document id"):
        build_datasets(DataConfig(data_path=("missing.jsonl",)), NoEodTokenizer(), 1)


def test_f83_indices_are_int64_and_tokens_are_narrow():
    documents = tokenize_documents(["a", "bc"], TOKENIZER)
    assert documents.tokens.dtype == np.uint16
    assert documents.starts.dtype == documents.lengths.dtype == np.int64

    class WideTokenizer(ByteTokenizer):
        vocab_size = 70_000
        eod_id = 69_999

    wide = tokenize_documents(["a"], WideTokenizer())
    assert wide.document(0).tolist() == [97, 69_999]


def test_f83_documents_behind_two_billion_tokens_keep_their_place():
    lengths = np.array([2**31 + 7, 5, 2**33], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    documents = DocumentSet(np.zeros(1, np.uint16), starts, lengths, vocab_size=10, pad_id=0)
    assert documents.num_tokens == 2**31 + 2**33 + 12
    selected = documents.select(np.array([2]))
    assert int(selected.starts[0]) == 2**31 + 12


def test_f36_the_arrays_are_read_only():
    documents = tokenize_documents(["abc", "de"], TOKENIZER)
    for values in (documents.tokens, documents.starts, documents.lengths, documents.document(0)):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 0


def test_empty_texts_are_skipped_and_counted():
    documents = tokenize_documents(["", "a", " \n\t", "b"], TOKENIZER)
    assert documents.num_documents == 2
    assert documents.num_skipped_empty == 2
    nothing = tokenize_documents(["", " "], TOKENIZER)
    assert (nothing.num_documents, nothing.num_tokens, nothing.num_skipped_empty) == (0, 0, 2)
    assert len(nothing.fingerprint) == 32


def test_token_counts_are_those_of_the_selected_documents():
    documents = tokenize_documents(["aab", "zz"], TOKENIZER).select(np.array([0]))
    counts = documents.token_counts()
    assert {index: int(count) for index, count in enumerate(counts) if count} == {97: 2, 98: 1, TOKENIZER.eod_id: 1}
    assert counts.dtype == np.int64


def test_the_fingerprint_depends_on_content_order_and_borders():
    def fingerprint(*texts):
        return tokenize_documents(texts, TOKENIZER).fingerprint

    assert fingerprint("ab", "c") == fingerprint("ab", "c")
    others = [fingerprint("ab", "d"), fingerprint("c", "ab"), fingerprint("ab", "c", "e")]
    assert len({fingerprint("ab", "c"), *others}) == 4
    flat = documents_of_lengths([3, 2])
    assert flat.fingerprint != documents_of_lengths([2, 3]).fingerprint
    assert flat.fingerprint != flat.select(np.array([0])).fingerprint


def test_the_split_is_by_document_and_meets_the_share():
    texts = [f"document {index}" for index in range(1000)]
    documents = tokenize_documents(texts, TOKENIZER)
    train, heldout = split_heldout(documents, 0.02, seed=7)
    assert heldout.num_documents == 20
    assert train.num_documents == 980
    assert sorted(contents(train) + contents(heldout)) == sorted(contents(documents))
    kept = set(contents(train))
    assert contents(train) == [content for content in contents(documents) if content in kept]


def test_the_split_depends_on_seed_and_content_only():
    texts = [f"document {index}" for index in range(300)]
    _, heldout = split_heldout(tokenize_documents(texts, TOKENIZER), 0.1, seed=7)
    np.random.seed(3)
    _, again = split_heldout(tokenize_documents(texts[::-1], TOKENIZER), 0.1, seed=7)
    _, other = split_heldout(tokenize_documents(texts, TOKENIZER), 0.1, seed=8)
    assert sorted(contents(again)) == sorted(contents(heldout))
    assert sorted(contents(other)) != sorted(contents(heldout))


def test_equal_documents_fall_on_the_same_side():
    texts = [f"document {index % 50}" for index in range(500)]
    for seed in range(5):
        train, heldout = split_heldout(tokenize_documents(texts, TOKENIZER), 0.1, seed)
        assert not set(contents(train)) & set(contents(heldout))
        assert 40 <= heldout.num_documents <= 70


def test_two_documents_make_one_of_each():
    train, heldout = split_heldout(tokenize_documents(["a", "b"], TOKENIZER), 0.001, seed=1)
    assert (train.num_documents, heldout.num_documents) == (1, 1)


@pytest.mark.parametrize(("texts", "fraction"), [(["a", "b"], 0.9), (["same"] * 5, 0.1)])
def test_a_split_that_leaves_nothing_to_train_on_is_refused(texts, fraction):
    with pytest.raises(ConfigError, match=r"--heldout-fraction.*holds out all of the \d documents.*lower it"):
        split_heldout(tokenize_documents(texts, TOKENIZER), fraction, seed=1)


def test_datasets_come_from_several_files_plain_and_compressed(tmp_path):
    first = jsonl(tmp_path / "a.jsonl", [f"a{index}" for index in range(6)] + [""])
    second = tmp_path / "b.jsonl.gz"
    second.write_bytes(gzip.compress(b'{"text": "b0"}\n{"text": "b1"}\n'))
    train, heldout = build_datasets(DataConfig(data_path=(first, str(second)), heldout_fraction=0.25), TOKENIZER, 1)
    assert (train.num_documents, heldout.num_documents) == (6, 2)
    assert train.num_skipped_empty == 1
    texts = {TOKENIZER.decode(part.document(i)) for part in (train, heldout) for i in range(part.num_documents)}
    assert texts == {f"a{index}" for index in range(6)} | {"b0", "b1"}


def test_max_documents_takes_the_first_ones_that_are_not_empty(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["one", "", "two", "three", "four"])
    train, heldout = build_datasets(DataConfig(data_path=(path,), max_documents=3), TOKENIZER, 1)
    texts = {TOKENIZER.decode(part.document(i)) for part in (train, heldout) for i in range(part.num_documents)}
    assert texts == {"one", "two", "three"}


@pytest.mark.parametrize(
    ("texts", "left"), [(["", " "], r"0 documents are left \(2 texts"), (["one", ""], "1 documents")]
)
def test_too_few_documents_are_refused(tmp_path, texts, left):
    path = jsonl(tmp_path / "few.jsonl", texts)
    with pytest.raises(ConfigError, match=rf"few\.jsonl: {left}.*give at least two documents"):
        build_datasets(DataConfig(data_path=(path,)), TOKENIZER, 1)


def test_the_embedded_corpus_is_the_default():
    train, heldout = build_datasets(DataConfig(max_documents=200), TOKENIZER, 1)
    assert (train.num_documents, heldout.num_documents) == (196, 4)


def test_cut_keeps_every_token_once_and_in_order() -> None:
    documents = DocumentSet(
        tokens=np.arange(100, dtype=np.uint16),
        starts=np.array([50, 0, 20], dtype=np.int64),
        lengths=np.array([7, 3, 6], dtype=np.int64),
        vocab_size=100,
        pad_id=99,
    )
    pieces = documents.cut(3)
    assert [pieces.document(index).tolist() for index in range(pieces.num_documents)] == [
        *([50, 51, 52], [53, 54, 55], [56]),
        [0, 1, 2],
        *([20, 21, 22], [23, 24, 25]),
    ]
    assert pieces.starts.dtype == pieces.lengths.dtype == np.int64
    assert documents.cut(7).lengths.tolist() == documents.lengths.tolist()


def test_documents_are_cut_after_the_split(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f'{{"text": "{chr(97 + index) * 20}"}}\n' for index in range(10)))
    config = DataConfig(data_path=(str(path),), heldout_fraction=0.3, max_segment_tokens=8)
    train, heldout = build_datasets(config, ByteTokenizer(), seed=0)
    assert max(train.lengths.max(), heldout.lengths.max()) == 8

    def letters(documents: DocumentSet) -> set[int]:
        return {int(id_) for index in range(documents.num_documents) for id_ in documents.document(index)} - {257}

    assert not letters(train) & letters(heldout)
