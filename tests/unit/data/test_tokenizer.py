import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_glue.config.sections import DataConfig
from megatron_glue.data.tokenizer import ByteTokenizer, build_tokenizer

TOKENIZER = ByteTokenizer()


@given(st.text())
def test_every_text_survives_the_round_trip(text):
    ids = TOKENIZER.encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(text.encode())
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode(ids.tolist()) == text


@given(st.binary())
def test_any_bytes_decode_to_text_that_can_be_printed(raw):
    text = TOKENIZER.decode(raw)
    assert text == raw.decode("utf-8", "replace")
    text.encode("utf-8")


def test_a_lone_surrogate_is_encoded_and_decodes_to_replacement_characters():
    decoded = TOKENIZER.decode(TOKENIZER.encode("a\ud800b"))
    assert decoded.strip("\ufffd") == decoded == "a\ufffd\ufffd\ufffdb"


def test_specials_are_distinct_from_bytes_and_have_no_text():
    specials = TOKENIZER.special_ids
    assert sorted(specials) == ["bos", "eod", "pad"]
    assert sorted(specials.values()) == list(range(256, TOKENIZER.vocab_size))
    assert TOKENIZER.decode([TOKENIZER.bos_id, 104, 105, TOKENIZER.eod_id, TOKENIZER.pad_id]) == "hi"


@pytest.mark.parametrize("outside", [-1, TOKENIZER.vocab_size])
def test_ids_outside_the_vocabulary_are_refused(outside):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        TOKENIZER.decode([65, outside])


def test_f36_encoded_ids_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        TOKENIZER.encode("abc")[0] = 1


def test_the_default_tokenizer_is_the_byte_tokenizer():
    assert isinstance(build_tokenizer(DataConfig()), ByteTokenizer)
