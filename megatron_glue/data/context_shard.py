"""Cuts a whole micro-batch into the rows of one context-parallel rank, on the host.

Every context-parallel rank builds the whole micro-batch, so no token travels; labels are set before the cut, so the
last token of a piece is trained to predict the first token of the next, wherever that is. Stands between packing and
the copy to the device, in the prefetching thread.

Shape suffixes: T tokens of one rank's row.
"""

from __future__ import annotations

from megatron_glue.types.packed_batch import IGNORE_LABEL, PackedBatch


def shard_batch(batch: PackedBatch, cp_rank: int, cp_size: int, alignment: int) -> PackedBatch:
    """Return the rows of one context-parallel rank.

    Args:
        batch: A whole micro-batch on the CPU.
        cp_rank: The rank among those that split each sequence.
        cp_size: How many they are.
        alignment: The segment alignment that the micro-batch was packed with, a multiple of 2 x ``cp_size``.

    Returns:
        A batch of 1 / ``cp_size`` of the rows, in fresh memory; ``num_label_tokens`` counts the labels among them. The
        batch itself for one rank.

    Raises:
        ValueError: If the micro-batch was not packed for this cut.
    """
    if cp_size == 1:
        return batch
    sequence = batch.sequence.shard(cp_rank, cp_size, alignment)
    assert sequence.token_ids_T is not None
    labels_T = batch.labels_T[sequence.token_ids_T]
    return PackedBatch(
        input_ids_T=batch.input_ids_T[sequence.token_ids_T],
        labels_T=labels_T,
        sequence=sequence,
        num_label_tokens=int((labels_T != IGNORE_LABEL).sum()),
        pack_ids=batch.pack_ids,
    )
