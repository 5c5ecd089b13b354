from dataclasses import replace

import pytest
import torch

from megatron_glue.moe.balance import OwnRows, RouterBalance
from megatron_glue.moe.router import Routing
from megatron_glue.types import ForwardContext, PackedSequence, RouterRecord, SavedDecisions


def rows_of(lengths: list[int], num_pad: int, residual_rows: slice | None) -> OwnRows:
    sequence = PackedSequence.from_lengths(lengths, num_pad)
    context = ForwardContext(sequence, residual_rows=residual_rows)
    num_rows = sequence.num_tokens if residual_rows is None else residual_rows.stop - residual_rows.start
    return OwnRows.of(context, num_rows)


@pytest.mark.parametrize(
    ("residual_rows", "segment_ids"),
    [
        (None, [0, 0, 0, 1, 1]),
        (slice(0, 4), [0, 0, 0, 1]),
        (slice(4, 8), [1]),
        (slice(2, 4), [0, 1]),
        (slice(6, 8), []),
        (slice(0, 0), []),
    ],
    ids=str,
)
def test_f62_valid_rows_follow_from_the_layout(residual_rows, segment_ids):
    rows = rows_of([3, 2], 3, residual_rows)
    assert rows.num_valid == len(segment_ids)
    assert rows.segment_ids_T.tolist() == segment_ids
    assert rows.num_tokens_everywhere == 5


def test_tokens_of_all_context_parallel_ranks_are_counted():
    sequence = PackedSequence.from_lengths([5, 1], 6)
    shards = [sequence.shard(rank, 2, 4) for rank in range(2)]
    rows = [OwnRows.of(ForwardContext(shard), shard.num_tokens) for shard in shards]
    assert [each.num_tokens_everywhere for each in rows] == [6, 6]
    assert sum(each.num_valid for each in rows) == 6


def test_other_rows_than_those_of_the_context_are_refused():
    context = ForwardContext(PackedSequence.from_lengths([6]), residual_rows=slice(3, 6))
    with pytest.raises(ValueError, match="6 rows; the layout describes 3"):
        OwnRows.of(context, 6)


def routing(num_tokens: int) -> Routing:
    logits = torch.randn(num_tokens, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    ids = logits.detach().topk(2).indices
    return Routing(ids, logits.gather(1, ids), logits, logits.softmax(-1))


@pytest.mark.parametrize("is_logged", [True, False])
def test_nothing_is_counted_summed_or_kept_that_nobody_needs(is_logged):
    """With both weights at zero the losses have no graph, and without a log they are not computed."""
    balance, chosen = RouterBalance(0), routing(5)
    log: list[RouterRecord] | None = [] if is_logged else None
    rows = rows_of([3, 2], 0, None)
    context = ForwardContext(rows.sequence, router_log=log)
    counts = torch.tensor([4, 3, 2, 1])
    counting = balance.start_counts(chosen, counts, rows, context)
    assert (counting is not None) == is_logged
    out = torch.zeros(5, 2, requires_grad=True)
    balance_counts = counting.wait() if counting else None
    assert balance.finish(out, chosen, counts, balance_counts, rows, context) is out
    if log is not None:
        assert len(log) == 1
        assert not log[0].aux_loss.requires_grad
        assert not log[0].z_loss.requires_grad


def test_an_evaluation_counts_nothing():
    balance, chosen, rows = RouterBalance(0, aux_loss_coeff=0.1, z_loss_coeff=0.1), routing(5), rows_of([3, 2], 0, None)
    context = ForwardContext(rows.sequence)
    counts = torch.tensor([4, 3, 2, 1])
    with torch.no_grad():
        assert balance.start_counts(chosen, counts, rows, context) is None
        assert not balance.finish(torch.zeros(5, 2), chosen, counts, None, rows, context).any()
        # A block that is to be recomputed keeps what its second run will need.
        assert balance.start_counts(chosen, counts, rows, replace(context, decisions=SavedDecisions())) is not None


def test_f50_a_recompute_logs_nothing():
    balance, chosen, rows = RouterBalance(0, aux_loss_coeff=0.1), routing(5), rows_of([3, 2], 0, None)
    log: list[RouterRecord] = []
    context = ForwardContext(rows.sequence, router_log=log, is_recompute=True)
    counts = torch.tensor([4, 3, 2, 1])
    out = balance.finish(torch.zeros(5, 2, requires_grad=True), chosen, counts, counts, rows, context)
    assert out.requires_grad
    assert log == []
