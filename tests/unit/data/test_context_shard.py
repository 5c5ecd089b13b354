"""What each context-parallel rank gets of a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_glue.data.context_shard import shard_batch
from megatron_glue.data.pack_stream import StreamPosition, assemble_batch
from megatron_glue.types import IGNORE_LABEL, PackedBatch
from tests.support.data_cases import documents_of_lengths, stream_of_lengths


def batch_of(lengths: list[int], num_tokens: int, alignment: int) -> PackedBatch:
    """One pack that holds documents of these lengths."""
    stream = stream_of_lengths(lengths, num_tokens, alignment=alignment)
    packs, _ = stream.take(StreamPosition(), 1)
    return assemble_batch(stream.documents, packs, num_tokens)


def test_f13_f14_odd_documents_keep_their_tokens_and_labels() -> None:
    whole = batch_of([5, 3, 7], 20, 4)
    assert sorted(whole.sequence.lengths) == [3, 5, 7]
    parts = [shard_batch(whole, rank, 2, 4) for rank in range(2)]
    assert sum(part.sequence.num_valid_tokens for part in parts) == 15
    assert sum(part.num_label_tokens for part in parts) == whole.num_label_tokens == 12
    for part in parts:
        assert part.num_label_tokens == int((part.labels_T != IGNORE_LABEL).sum())
        assert (part.labels_T[part.sequence.num_valid_tokens :] == IGNORE_LABEL).all()


def test_the_label_of_the_last_token_of_a_piece_is_the_first_token_of_the_next() -> None:
    whole = batch_of([16], 16, 8)
    first, second = (shard_batch(whole, rank, 2, 8) for rank in range(2))
    # Tokens are 1, 2, 3, ...; rank 0 holds the first and last 4 of them.
    assert first.input_ids_T.tolist() == [1, 2, 3, 4, 13, 14, 15, 16]
    assert first.labels_T.tolist() == [2, 3, 4, 5, 14, 15, 16, IGNORE_LABEL]
    assert second.labels_T.tolist() == [6, 7, 8, 9, 10, 11, 12, 13]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.sampled_from([2, 4]), st.integers(1, 2))
def test_all_ranks_together_hold_the_batch(lengths: list[int], size: int, factor: int) -> None:
    alignment = 2 * size * factor
    stream = stream_of_lengths(lengths, 32, alignment=alignment)
    packs, _ = stream.take(StreamPosition(), stream.plan(0).num_packs)
    whole = assemble_batch(stream.documents, packs, 32 * len(packs))
    parts = [shard_batch(whole, rank, size, alignment) for rank in range(size)]
    ids = torch.cat([part.sequence.token_ids_T for part in parts if part.sequence.token_ids_T is not None])
    order = torch.from_numpy(np.argsort(ids.numpy()))
    assert torch.equal(torch.cat([part.input_ids_T for part in parts])[order], whole.input_ids_T)
    assert torch.equal(torch.cat([part.labels_T for part in parts])[order], whole.labels_T)
    assert sum(part.num_label_tokens for part in parts) == whole.num_label_tokens
    assert all(part.pack_ids == whole.pack_ids for part in parts)


def test_f26_a_batch_without_a_token_is_cut_too() -> None:
    empty = assemble_batch(documents_of_lengths([3]), [], 8)
    parts = [shard_batch(empty, rank, 2, 4) for rank in range(2)]
    assert [part.sequence.num_pad_tokens for part in parts] == [4, 4]
    assert [part.num_label_tokens for part in parts] == [0, 0]


def test_one_rank_holds_the_batch_itself() -> None:
    whole = batch_of([5], 8, 1)
    assert shard_batch(whole, 0, 1, 1) is whole


def test_a_batch_packed_without_the_alignment_is_refused() -> None:
    with pytest.raises(ValueError, match="pack it with that alignment"):
        shard_batch(batch_of([5, 3, 7, 1], 16, 1), 0, 2, 4)


def test_f36_a_shard_is_fresh_memory() -> None:
    whole = batch_of([5, 3], 16, 4)
    part = shard_batch(whole, 0, 2, 4)
    part.input_ids_T.zero_()
    part.labels_T.zero_()
    assert whole.input_ids_T.any()
    assert (whole.labels_T == IGNORE_LABEL).any()
