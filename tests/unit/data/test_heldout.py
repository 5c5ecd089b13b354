import math
from collections import Counter

import numpy as np
import pytest

from megatron_glue.data.documents import tokenize_documents
from megatron_glue.data.heldout import EvalPlan, eval_batches, eval_label_tokens, unigram_entropy
from megatron_glue.data.loader import BatchPlan
from megatron_glue.data.tokenizer import ByteTokenizer
from megatron_glue.types.packed_batch import IGNORE_LABEL
from tests.support.data_cases import documents_of_lengths, skewed_lengths, stream_of_lengths


def plan(micro_batch_size, num_packs, dp_rank=0, dp_size=1, seq_length=16):
    return EvalPlan(seq_length, 8, BatchPlan(micro_batch_size, num_packs, dp_rank, dp_size))


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_f91_ranks_have_equally_many_batches_and_share_the_packs(dp_size):
    heldout = documents_of_lengths([16] * 5)
    by_rank = [eval_batches(heldout, plan(1, 8, rank, dp_size)) for rank in range(dp_size)]
    assert {len(batches) for batches in by_rank} == {8 // dp_size}
    seen = sorted(pack for batches in by_rank for batch in batches for pack in batch.pack_ids)
    assert seen == [0, 1, 2, 3, 4]
    for batches in by_rank:
        for batch in batches:
            assert batch.sequence.num_tokens == 16
            assert batch.num_label_tokens == (15 if batch.pack_ids else 0)


def test_f26_a_batch_without_packs_is_padding_of_full_size_with_no_label():
    last = eval_batches(documents_of_lengths([16] * 3), plan(2, 8))[-1]
    assert last.sequence.num_pad_tokens == last.sequence.num_tokens == 32
    assert last.num_label_tokens == 0
    assert (last.labels_T == IGNORE_LABEL).all()


def test_a_micro_batch_may_be_filled_in_part():
    batches = eval_batches(documents_of_lengths([16] * 3), plan(2, 4))
    assert [batch.pack_ids for batch in batches] == [(0, 1), (2,)]
    assert batches[1].sequence.num_pad_tokens == 16


def test_the_batches_are_the_same_every_time_and_for_every_layout():
    heldout = documents_of_lengths(skewed_lengths(60, largest=60))
    first = eval_batches(heldout, plan(1, 8))
    second = eval_batches(heldout, plan(1, 8))
    assert [batch.input_ids_T.tolist() for batch in first] == [batch.input_ids_T.tolist() for batch in second]
    for rank in range(2):
        mine = eval_batches(heldout, plan(1, 8, rank, 2))
        assert [b.input_ids_T.tolist() for b in mine] == [b.input_ids_T.tolist() for b in first[rank::2]]


def test_the_plan_follows_the_shapes_and_ranks_of_training_but_not_its_seed():
    training = BatchPlan(micro_batch_size=2, global_batch_size=16, dp_rank=1, dp_size=2)
    stream = stream_of_lengths([3], seq_length=32, window=5, seed=99, alignment=4)
    built = EvalPlan.build(stream, training, num_micro_batches=3)
    assert built == EvalPlan(32, 5, BatchPlan(2, 12, 1, 2), 4)
    assert built.batches.num_micro_batches == 3


def test_context_parallel_ranks_hold_their_rows_of_the_same_batches():
    heldout = documents_of_lengths(skewed_lengths(20, largest=60))
    whole = eval_batches(heldout, EvalPlan(16, 8, BatchPlan(2, 8), 4))
    parts = [eval_batches(heldout, EvalPlan(16, 8, BatchPlan(2, 8, cp_rank=r, cp_size=2), 4)) for r in range(2)]
    for batch, *shards in zip(whole, *parts, strict=True):
        assert sum(shard.num_label_tokens for shard in shards) == batch.num_label_tokens
        for shard in shards:
            assert shard.pack_ids == batch.pack_ids
            assert shard.input_ids_T.tolist() == batch.input_ids_T[shard.sequence.token_ids_T].tolist()


def test_label_tokens_are_those_of_all_ranks():
    heldout = documents_of_lengths(skewed_lengths(40, largest=60))
    total = sum(b.num_label_tokens for rank in range(2) for b in eval_batches(heldout, plan(1, 6, rank, 2)))
    assert eval_label_tokens(heldout, plan(1, 6, 0, 2)) == total


@pytest.mark.parametrize("num_packs", [2, 100])
def test_unigram_entropy_is_the_loss_of_predicting_evaluated_labels_by_training_frequency(num_packs):
    tokenizer = ByteTokenizer()
    train = tokenize_documents(["aaab", "ab\u00e4c", "xyz"], tokenizer)
    heldout = tokenize_documents(["abacus", "zebra " * 5, "b"], tokenizer)
    counts = Counter(int(token) for index in range(3) for token in train.document(index))
    total = train.num_tokens + tokenizer.vocab_size
    labels = [
        label
        for batch in eval_batches(heldout, plan(1, num_packs))
        for label in batch.labels_T.tolist()
        if label != IGNORE_LABEL
    ]
    expected = -sum(math.log((counts[label] + 1) / total) for label in labels) / len(labels)
    assert unigram_entropy(train, heldout, plan(1, num_packs)) == pytest.approx(expected, rel=1e-12)
    # All ranks measure the whole evaluation.
    if num_packs == 2:
        assert unigram_entropy(train, heldout, plan(1, 2, 1, 2)) == pytest.approx(expected, rel=1e-12)


def test_unigram_entropy_of_nothing_is_zero_and_of_uniform_text_is_log_of_the_vocabulary():
    single = documents_of_lengths([1])
    assert unigram_entropy(single, single, plan(1, 1)) == 0.0
    uniform = documents_of_lengths([200])
    nats = unigram_entropy(uniform, uniform, plan(1, 100))
    assert nats == pytest.approx(np.log((200 + uniform.vocab_size) / 2), rel=1e-12)
