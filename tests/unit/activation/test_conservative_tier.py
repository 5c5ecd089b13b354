"""With a full synchronisation at every hand-over no event is needed, and nothing overlaps."""

from __future__ import annotations

import itertools

from megatron_glue.activation import ActivationManager, ActivationPlan
from megatron_glue.activation.conservative_tier import ConservativeTier
from megatron_glue.activation.offloader import InputOffloader
from megatron_glue.activation.pinned_tier import PinnedTier
from tests.support.activation_blocks import SlowTier, run_forward, toy_blocks
from tests.support.activation_variants import inputs, managed
from tests.support.simulated_device import SimulatedDevice

PLAN = ActivationPlan(recompute=True, offload=True, double_buffer=True)
EVERY_EDGE = list(itertools.permutations(("compute", "offload", "reload"), 2))


def violations_without_events(conservative: bool) -> list[str]:
    """Two steps on a device that ignores all events between its streams, in every order of its streams."""
    found = []
    for order in itertools.permutations(("compute", "offload", "reload")):
        device = SimulatedDevice(eager_compute=False, ignored_edges=EVERY_EDGE)
        tier = PinnedTier(device)
        offloader = InputOffloader(PLAN, ConservativeTier(tier) if conservative else tier, num_buffers=2)
        for step in range(2):
            offloader.reset()
            claims = []
            for block in range(5):
                x = device.new_activation(value=10.0 * step + block, num_elements=3)
                claims.append(offloader.store(x, micro_batch=0))
                del x
            offloader.prefetch_first()
            for block in reversed(range(5)):
                device.check(claims[block].fetch(), 10.0 * step + block)
                claims[block].release()
        device.run_by_priority(order)
        found += device.violations
    return found


def test_a_missing_event_is_told_by_the_difference():
    assert violations_without_events(conservative=False) != []
    assert violations_without_events(conservative=True) == []


def test_every_copy_of_the_disk_tier_ends_before_compute_goes_on(tmp_path):
    plan = ActivationPlan(
        recompute=True, offload=True, double_buffer=True, conservative_sync=True, record_timeline=True
    )
    manager = ActivationManager(plan, "cpu", tier=SlowTier(tmp_path, read_s=0.01))
    run_forward(manager, toy_blocks(4), inputs(1)[0]).sum().backward()
    bars = manager.timeline()
    blocks = [bar for bar in bars if bar.name == "backward"]
    copies = [bar for bar in bars if bar.lane == "reload"]
    assert len(blocks) == len(copies) == 4
    assert all(copy.end_ms <= block.start_ms or block.end_ms <= copy.start_ms for copy in copies for block in blocks)
    manager.close()


def test_describe_says_that_nothing_overlaps(tmp_path):
    for variant in ("disk-double-conservative", "pinned-double-conservative"):
        with managed(variant, tmp_path) as manager:
            assert "a full synchronisation at every hand-over" in manager.describe()
