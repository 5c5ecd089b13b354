"""Ranks that measured differently decide alike, for the rank that can hide least."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron_glue.activation import ActivationManager, ActivationPlan
from megatron_glue.activation.offload_costs import OffloadCosts
from megatron_glue.activation.offload_policy import OffloadBounds, decide
from megatron_glue.activation.offload_tuner import OffloadTuner
from megatron_glue.activation.parts import PartManagers
from megatron_glue.parallel.collectives import maxima_over_ranks
from tests.support.activation_blocks import gradients_of, run_forward, toy_blocks
from tests.support.activation_variants import assert_same, inputs, plain_gradients
from tests.support.processes import run_distributed

FAST = OffloadCosts(0.5, 1.0, 1.0, 3.0, input_bytes=1 << 20, total_bytes=11 << 20, num_blocks=12)
OF_RANK = (FAST, replace(FAST, back_ms=6.0), OffloadCosts())
"""A fast rank, one with slow copies, and one whose part of the model has no input that leaves."""


class MeasuredManager(ActivationManager):
    """Reports the costs of its rank instead of what it measured."""

    def stop_observing(self) -> OffloadCosts:
        return OF_RANK[dist.get_rank()]


def decide_together(rank, world_size):
    plan = ActivationPlan(recompute=True, offload=True, double_buffer=True, offload_dir=Path(tempfile.mkdtemp()))
    tuner = OffloadTuner(OffloadBounds(), f"rank {rank}", partial(maxima_over_ranks, group=dist.group.WORLD))
    parts = PartManagers([MeasuredManager(plan, "cpu")], tuner)
    blocks, (x,) = toy_blocks(12), inputs(1)
    expected = plain_gradients(blocks, [x])
    for _ in range(5):
        parts.begin_step()
        run_forward(parts.managers[0], blocks, x, knows_last=True).square().sum().backward()
        assert_same(gradients_of(blocks), expected)
    state = parts.state_dict()
    parts.close()
    # Saved by a rank on another device: one rank would take it over, the others would measure; so all measure.
    again = PartManagers(
        [MeasuredManager(plan, "cpu")], tuner_again := OffloadTuner(OffloadBounds(), f"rank {rank}", tuner._merge)
    )
    again.load_state_dict({**state, "circumstances": "rank 0"})
    assert tuner_again.decision is None
    again.close()
    return state["decision"]


def test_ranks_with_different_measurements_decide_alike():
    decisions = run_distributed(decide_together, len(OF_RANK))
    worst = decide(OF_RANK[1], OffloadBounds())
    assert decisions == [worst.as_dict()] * len(OF_RANK)
    assert worst != decide(OF_RANK[0], OffloadBounds())
