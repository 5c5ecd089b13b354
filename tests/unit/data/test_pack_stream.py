import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_glue.config.errors import ConfigError
from megatron_glue.data.documents import DocumentSet
from megatron_glue.data.pack_stream import PackStream, StreamPosition, assemble_batch
from megatron_glue.types.packed_batch import IGNORE_LABEL
from megatron_glue.types.packed_sequence import PAD_SEGMENT_ID
from tests.support.data_cases import documents_of_lengths, segments, skewed_lengths, stream_of_lengths


def test_f27_no_label_crosses_a_document_boundary():
    documents = DocumentSet(
        tokens=np.array([1, 2, 3, 7, 8], dtype=np.uint16),
        starts=np.array([0, 3]),
        lengths=np.array([3, 2]),
        vocab_size=10,
        pad_id=9,
    )
    packs, _ = PackStream(documents, 8, 4, 1).take(StreamPosition(), 1)
    batch = assemble_batch(documents, packs, 8)
    assert batch.input_ids_T.tolist() == [1, 2, 3, 7, 8, 9, 9, 9]
    assert batch.labels_T.tolist() == [2, 3, IGNORE_LABEL, 8] + [IGNORE_LABEL] * 4
    assert batch.sequence.lengths == (3, 2)
    assert batch.sequence.num_pad_tokens == 3
    assert batch.num_label_tokens == 3


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(2, 12), st.integers(1, 4), st.integers(0, 5))
def test_a_batch_holds_its_segments_their_labels_and_padding_at_the_tail(lengths, seq_length, count, skip):
    stream = stream_of_lengths(lengths, seq_length)
    _, position = stream.take(StreamPosition(), skip)
    packs, _ = stream.take(position, count)
    batch = assemble_batch(stream.documents, packs, count * seq_length)
    assert batch.input_ids_T.shape == batch.labels_T.shape == (count * seq_length,)
    assert batch.input_ids_T.dtype == batch.labels_T.dtype == torch.int64
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    for ids, labels in segments(batch):
        assert labels == [*ids[1:], IGNORE_LABEL]
        assert ids == list(range(ids[0], ids[0] + len(ids)))
        assert len({document_of[token - 1] for token in ids}) == 1
    num_valid = batch.sequence.num_valid_tokens
    assert (batch.input_ids_T[num_valid:] == stream.documents.pad_id).all()
    assert (batch.labels_T[num_valid:] == IGNORE_LABEL).all()
    assert (batch.sequence.segment_ids_T[num_valid:] == PAD_SEGMENT_ID).all()
    assert batch.num_label_tokens == int((batch.labels_T != IGNORE_LABEL).sum())
    assert batch.num_label_tokens == sum(pack.num_label_tokens for pack in packs)
    assert num_valid == sum(pack.num_tokens for pack in packs)
    assert batch.pack_ids == tuple(range(skip, skip + count))
    assert set(batch.sequence.position_starts) == {0}


def test_f3_single_token_segments_have_no_label():
    documents = documents_of_lengths([1, 1, 1])
    packs, _ = PackStream(documents, 4, 4, 1).take(StreamPosition(), 1)
    batch = assemble_batch(documents, packs, 4)
    assert batch.num_label_tokens == 0
    assert batch.sequence.lengths == (1, 1, 1)
    assert (batch.labels_T == IGNORE_LABEL).all()


def test_a_batch_of_no_packs_is_all_padding():
    batch = assemble_batch(documents_of_lengths([3]), [], 8)
    assert (batch.sequence.num_valid_tokens, batch.sequence.num_pad_tokens, batch.num_label_tokens) == (0, 8, 0)
    assert (batch.labels_T == IGNORE_LABEL).all()


def test_f36_a_batch_is_fresh_memory():
    stream = stream_of_lengths([3, 5, 9])
    packs, _ = stream.take(StreamPosition(), 1)
    first = assemble_batch(stream.documents, packs, 16)
    expected = first.input_ids_T.clone(), first.labels_T.clone()
    first.input_ids_T.zero_()
    first.labels_T.fill_(IGNORE_LABEL)
    second = assemble_batch(stream.documents, packs, 16)
    assert torch.equal(second.input_ids_T, expected[0])
    assert torch.equal(second.labels_T, expected[1])


def test_an_epoch_holds_every_token_once_and_the_next_one_follows_without_a_gap():
    lengths = skewed_lengths(40, largest=100)
    stream = stream_of_lengths(lengths, 32)
    position = StreamPosition()
    for epoch in range(3):
        assert (position.epoch, position.pack) == (epoch, 0)
        packs, position = stream.take(position, stream.plan(epoch).num_packs)
        batch = assemble_batch(stream.documents, packs, 32 * len(packs))
        ids = batch.input_ids_T[: batch.sequence.num_valid_tokens]
        assert sorted(ids.tolist()) == list(range(1, sum(lengths) + 1))


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.lists(st.integers(1, 7), max_size=8))
def test_any_way_of_taking_packs_gives_the_same_stream(lengths, counts):
    stream = stream_of_lengths(lengths, 8)
    position, stepwise = StreamPosition(), []
    for count in counts:
        packs, position = stream.take(position, count)
        stepwise += [(pack.plan.epoch, pack.pack, pack.stream_index) for pack in packs]
    at_once, end = stream_of_lengths(lengths, 8).take(StreamPosition(), sum(counts))
    assert stepwise == [(pack.plan.epoch, pack.pack, pack.stream_index) for pack in at_once]
    assert end == position


def test_f92_one_document_of_one_token_streams_for_ever():
    stream = stream_of_lengths([1])
    packs, position = stream.take(StreamPosition(), 5)
    assert [(pack.plan.epoch, pack.pack) for pack in packs] == [(epoch, 0) for epoch in range(5)]
    assert position == StreamPosition(5, 0, 5)


def test_only_two_plans_are_kept():
    stream = stream_of_lengths([3, 4])
    stream.take(StreamPosition(), 50)
    assert len(stream._plans) == 2


def test_the_alignment_is_part_of_the_identity():
    identities = [stream_of_lengths([3, 4], alignment=a).identity() for a in (1, 4)]
    assert [identity["segment_alignment"] for identity in identities] == [1, 4]


def test_no_documents_are_refused():
    with pytest.raises(ConfigError, match="nothing to pack"):
        stream_of_lengths([])
