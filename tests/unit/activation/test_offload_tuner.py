"""The first steps are measured, the decision holds from the step after them, and gradients never notice."""

from __future__ import annotations

import pytest

from megatron_glue.activation import ActivationManager, ActivationPlan, offload_tuner
from megatron_glue.activation.offload_policy import OffloadBounds, OffloadDecision
from megatron_glue.activation.offload_tuner import OffloadTuner
from megatron_glue.activation.parts import PartManagers
from megatron_glue.activation.pinned_tier import PinnedTier
from tests.support.activation_blocks import SlowTier, gradients_of, no_new_threads, run_forward, toy_blocks
from tests.support.activation_variants import assert_same, inputs, plain_gradients
from tests.support.simulated_device import SimulatedDevice

PLAN = ActivationPlan(recompute=True, offload=True, double_buffer=True, poison=True)
NUM_BLOCKS = 5


def tuner_of(merge=list, circumstances="here", **bounds):
    return OffloadTuner(OffloadBounds(**bounds), circumstances, merge)


def train(parts, blocks, micro_batches, num_steps):
    """Gradients and counters of each step."""
    for _ in range(num_steps):
        parts.begin_step()
        parts.managers[0].reset_stats()
        for index, x in enumerate(micro_batches):
            run_forward(parts.managers[0], blocks, x, index, knows_last=True).square().sum().backward()
        yield gradients_of(blocks), parts.stats()


@pytest.mark.parametrize("tier", ["disk", "pinned"])
@pytest.mark.parametrize(
    ("num_leaving", "num_buffers", "num_offloads"), [(5, 2, 8), (3, 2, 6), (2, 1, 4), (1, 1, 2), (0, 0, 0)]
)
def test_gradients_are_the_same_whatever_is_decided(
    monkeypatch, tmp_path, tier, num_leaving, num_buffers, num_offloads
):
    """Also in the step in which the decision changes."""
    decision = OffloadDecision(num_leaving, NUM_BLOCKS, num_buffers, "said so")
    monkeypatch.setattr(offload_tuner, "decide", lambda costs, bounds: decision)
    blocks, micro_batches = toy_blocks(NUM_BLOCKS, dropout="context"), inputs(2)
    expected = plain_gradients(blocks, micro_batches)
    device = SimulatedDevice(eager_compute=True)
    chosen = PinnedTier(device, poison=True) if tier == "pinned" else SlowTier(tmp_path)
    with no_new_threads():
        parts = PartManagers([ActivationManager(PLAN, "cpu", tier=chosen)], tuner_of())
        assert "decided after 3 steps" in parts.describe()
        counts = []
        for gradients, stats in train(parts, blocks, micro_batches, 5):
            assert_same(gradients, expected)
            counts.append(stats.num_offloads)
        assert counts == [8] * 3 + [num_offloads] * 2
        assert parts.stats().buffer_bytes == num_buffers * 4096 * (num_leaving > 0)
        assert decision.describe() in parts.describe()
        assert parts.managers[0].num_tracked_inputs == 0
        parts.close()
    assert device.violations == []


def test_two_steps_are_measured_and_figures_go_on(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        offload_tuner,
        "decide",
        lambda costs, bounds: seen.append(costs) or OffloadDecision(NUM_BLOCKS, NUM_BLOCKS, 2, ""),
    )
    blocks = toy_blocks(NUM_BLOCKS)
    for block in blocks:
        block.backward_s = 0.01
    parts = PartManagers([ActivationManager(PLAN, "cpu", tier=SlowTier(tmp_path, 0.002, 0.004))], tuner_of())
    for _ in range(4):
        parts.begin_step()
        run_forward(parts.managers[0], blocks, inputs(1)[0], knows_last=True).sum().backward()
    (costs,) = seen
    assert costs.num_blocks == NUM_BLOCKS
    assert costs.input_bytes == 4096, "rounded up to a page"
    assert costs.total_bytes == 4 * 512
    assert costs.away_ms >= 2
    assert costs.back_ms >= 4
    assert costs.backward_ms >= 10
    assert costs.forward_ms > 0
    assert len(parts.step_times()) == 4, "measuring resets nothing"
    assert parts.timelines() == [[]], "and leaves no timeline that nobody asked for"
    parts.close()


def test_a_timeline_that_was_asked_for_goes_on_through_measuring(tmp_path):
    parts = PartManagers([ActivationManager(PLAN, "cpu", tier=SlowTier(tmp_path))], tuner_of())
    blocks = toy_blocks(2)
    for step in range(5):
        if step == 2:  # in the middle of measuring
            parts.start_timeline()
        parts.begin_step()
        run_forward(parts.managers[0], blocks, inputs(1)[0], knows_last=True).sum().backward()
    assert {event.step for event in parts.timelines()[0]} >= {1}
    parts.close()


def test_a_resumed_run_takes_the_decision_over_and_measures_nothing(tmp_path, caplog):
    caplog.set_level("INFO")
    decision = OffloadDecision(2, NUM_BLOCKS, 1, "slow copies")
    saved = {"circumstances": "here", "decision": decision.as_dict()}
    parts = PartManagers([ActivationManager(PLAN, "cpu", tier=SlowTier(tmp_path))], tuner_of())
    assert parts.state_dict() == {}
    parts.load_state_dict(saved)
    assert parts.state_dict() == saved
    assert "slow copies, as when the run was saved" in caplog.text
    blocks, micro_batches = toy_blocks(NUM_BLOCKS), inputs(2)
    expected = plain_gradients(blocks, micro_batches)
    for gradients, stats in train(parts, blocks, micro_batches, 1):
        assert_same(gradients, expected)
        assert (stats.num_offloads, stats.buffer_bytes) == (4, 4096)
    parts.close()


def test_other_circumstances_on_any_rank_are_measured_anew(tmp_path, caplog):
    caplog.set_level("INFO")
    saved = {"circumstances": "there", "decision": OffloadDecision(2, NUM_BLOCKS, 1, "").as_dict()}
    for circumstances, merge in (("here", list), ("there", lambda values: [1.0])):
        caplog.clear()
        parts = PartManagers(
            [ActivationManager(PLAN, "cpu", tier=SlowTier(tmp_path))], tuner_of(merge, circumstances=circumstances)
        )
        parts.load_state_dict(saved)
        assert "measured anew, the saved decision is of there" in caplog.text
        assert "decided after 3 steps" in parts.describe()
        parts.close()


def test_without_a_tuner_a_saved_decision_counts_for_nothing(tmp_path):
    parts = PartManagers([ActivationManager(PLAN, "cpu", tier=SlowTier(tmp_path))])
    parts.load_state_dict({"circumstances": "here", "decision": OffloadDecision(0, 1, 0, "").as_dict()})
    assert "offload is off" not in parts.describe()
    assert parts.state_dict() == {}
    parts.close()
