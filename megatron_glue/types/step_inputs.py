"""What the passes of one optimizer step take: its micro-batches, each with what blocks see of it."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_glue.types.forward_context import ForwardContext
from megatron_glue.types.packed_batch import PackedBatch

StepInputs = Sequence[tuple[PackedBatch, ForwardContext]]
"""Micro-batches on the device, in order."""
