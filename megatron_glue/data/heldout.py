"""Fixed held-out batches, and the loss that predicting by frequency alone would have on them.

The packs and their order depend on the held-out documents, the length, the window and the alignment only: not on the
run's seed, the rank or the step. All ranks get equally many micro-batches; where packs run out, batches of padding with
no label follow, so that no rank waits for another. It does not compute a model's loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_glue.data.context_shard import shard_batch
from megatron_glue.data.documents import DocumentSet
from megatron_glue.data.loader import BatchPlan
from megatron_glue.data.pack_stream import PackReference, PackStream, assemble_batch
from megatron_glue.types.packed_batch import PackedBatch

_HELDOUT_SEED = 0


@dataclass(frozen=True)
class EvalPlan:
    """Which held-out packs are evaluated, and by whom.

    Attributes:
        seq_length: Tokens per pack.
        window: Documents packed together.
        batches: How the packs of the whole evaluation are dealt to ranks: ``global_batch_size`` is the number of packs
            of one evaluation, micro_batch_size x dp_size x (micro-batches per rank).
        alignment: Segments cost their length rounded up to this; off: 1.
    """

    seq_length: int
    window: int
    batches: BatchPlan
    alignment: int = 1

    @classmethod
    def build(cls, stream: PackStream, training: BatchPlan, num_micro_batches: int) -> EvalPlan:
        """Return a plan of ``num_micro_batches`` per rank with the shapes and ranks of training."""
        num_packs = training.micro_batch_size * training.dp_size * num_micro_batches
        batches = replace(training, global_batch_size=num_packs)
        return cls(stream.rule.seq_length, stream.rule.window, batches, stream.rule.alignment)


def eval_batches(heldout: DocumentSet, plan: EvalPlan, *, device: torch.device | str = "cpu") -> list[PackedBatch]:
    """Return this rank's held-out micro-batches, the same at every evaluation.

    Args:
        heldout: Held-out documents.
        plan: Which packs.
        device: Where the batches go.

    Returns:
        ``plan.batches.num_micro_batches`` batches on every rank; those without packs are padding of full size with 0
        labels. A pack is never repeated. Context-parallel ranks get their rows of the same batches.
    """
    packs, ranks = _evaluated_packs(heldout, plan), plan.batches
    num_tokens = ranks.micro_batch_size * plan.seq_length
    whole = (assemble_batch(heldout, packs[ranks.packs_of(i)], num_tokens) for i in range(ranks.num_micro_batches))
    return [shard_batch(batch, ranks.cp_rank, ranks.cp_size, plan.alignment).to(device) for batch in whole]


def eval_label_tokens(heldout: DocumentSet, plan: EvalPlan) -> int:
    """Return the labels of the whole evaluation, over all ranks."""
    return sum(pack.num_label_tokens for pack in _evaluated_packs(heldout, plan))


def unigram_entropy(train: DocumentSet, heldout: DocumentSet, plan: EvalPlan) -> float:
    """Return the loss of predicting every held-out label by how frequent it is in training.

    That is the cross-entropy H = -mean(log q(label)) over exactly the labels of :func:`eval_batches` of all ranks, with
    q the token frequencies of the training documents plus one count for every id of the vocabulary (Laplace). A
    model whose held-out loss is not below it has learnt nothing about order.

    Args:
        train: Training documents; all their tokens are counted, eods included.
        heldout: Held-out documents.
        plan: Which held-out packs are evaluated.

    Returns:
        Nats per token; 0 if there is no label.
    """
    counts = train.token_counts() + 1
    nats = np.log(float(counts.sum())) - np.log(counts)
    sum_nats, num_labels = 0.0, 0
    for pack in _evaluated_packs(heldout, plan):
        batch = assemble_batch(heldout, [pack], plan.seq_length)
        labels = batch.labels_T.numpy()
        sum_nats += float(nats[labels[labels >= 0]].sum())
        num_labels += batch.num_label_tokens
    return sum_nats / max(num_labels, 1)


def _evaluated_packs(heldout: DocumentSet, plan: EvalPlan) -> list[PackReference]:
    """Return the first packs of a fixed epoch, at most as many as there are, without rolling over."""
    epoch = PackStream(heldout, plan.seq_length, plan.window, _HELDOUT_SEED, plan.alignment).plan(0)
    count = min(plan.batches.global_batch_size, epoch.num_packs)
    return [PackReference(epoch, index, index) for index in range(count)]
