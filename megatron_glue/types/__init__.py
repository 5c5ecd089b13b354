"""Floor 0: frozen contracts between rooms, with their invariants. No computation, no configuration."""

from megatron_glue.types.context_shard import ContextShard
from megatron_glue.types.dispatch import (
    BoundedMetadata,
    DispatchLayout,
    DispatchMetadata,
    ExchangeLayout,
    RoutingDecision,
    TokenMetadata,
)
from megatron_glue.types.forward_context import ForwardContext, RouterRecord, SavedDecisions
from megatron_glue.types.packed_batch import IGNORE_LABEL, PackedBatch
from megatron_glue.types.packed_sequence import PAD_SEGMENT_ID, PackedSequence
from megatron_glue.types.step_inputs import StepInputs
from megatron_glue.types.token_groups import PairSlots, ReplicatedGroups, TokenGroups

__all__ = [
    "IGNORE_LABEL",
    "PAD_SEGMENT_ID",
    "BoundedMetadata",
    "ContextShard",
    "DispatchLayout",
    "DispatchMetadata",
    "ExchangeLayout",
    "ForwardContext",
    "PackedBatch",
    "PackedSequence",
    "PairSlots",
    "ReplicatedGroups",
    "RouterRecord",
    "RoutingDecision",
    "SavedDecisions",
    "StepInputs",
    "TokenGroups",
    "TokenMetadata",
]
