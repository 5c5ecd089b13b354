"""Every hand-over between streams has its event, and each event is needed."""

from __future__ import annotations

import itertools

import pytest

from megatron_glue.activation.offloader import InputOffloader
from megatron_glue.activation.pinned_tier import MAX_PENDING_OFFLOADS, PinnedTier
from megatron_glue.activation.plan import ActivationPlan
from tests.support.simulated_device import EDGES, Edge, SimulatedDevice

PLAN = ActivationPlan(recompute=True, offload=True, double_buffer=True)


def run_steps(device: SimulatedDevice, *, num_buffers: int, num_blocks: int = 5, num_steps: int = 2) -> None:
    """Queue whole steps as a host does that runs far ahead of its device. The second computes on another stream."""
    offloader = InputOffloader(PLAN, PinnedTier(device), num_buffers)
    for step in range(num_steps):
        offloader.reset()
        if step == 1:
            device.use_another_compute_stream()
        claims = []
        for block in range(num_blocks):
            x = device.new_activation(value=10.0 * step + block, num_elements=3)
            claims.append(offloader.store(x, micro_batch=0))
            del x
        offloader.prefetch_first()
        for block in reversed(range(num_blocks)):
            device.check(claims[block].fetch(), 10.0 * step + block)
            claims[block].release()
    assert offloader.num_tracked == 0


def violations_under_all_priorities(num_buffers: int, ignored_edges: tuple[Edge, ...] = ()) -> list[str]:
    found = []
    for order in itertools.permutations(("compute", "offload", "reload", "compute2")):
        device = SimulatedDevice(eager_compute=False, ignored_edges=ignored_edges)
        run_steps(device, num_buffers=num_buffers)
        assert device.edges == set(EDGES.values()), "all hand-overs are issued, and no others"
        device.run_by_priority(order)
        found += device.violations
    return found


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_all_orders_of_the_device_give_the_right_inputs(num_buffers):
    assert violations_under_all_priorities(num_buffers) == []


def test_with_one_copy_in_flight_one_stream_carries_both_directions():
    for order in itertools.permutations(("compute", "offload", "reload")):
        device = SimulatedDevice(eager_compute=False)
        offloader = InputOffloader(PLAN, PinnedTier(device, max_inflight=1), num_buffers=2)
        assert list(device.streams) == ["compute", "offload"]
        claims = []
        for value in range(5):
            x = device.new_activation(value, num_elements=3)
            claims.append(offloader.store(x, micro_batch=0))
            del x
        offloader.prefetch_first()
        for value in reversed(range(5)):
            device.check(claims[value].fetch(), value)
            claims[value].release()
        device.run_by_priority([name for name in order if name in device.streams])
        assert device.violations == []
        assert "one copy at a time" in offloader.describe()


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES.keys())
def test_without_this_edge_some_order_of_the_device_goes_wrong(edge):
    assert violations_under_all_priorities(2, (edge,)) != []


def test_few_inputs_stay_on_the_device_behind_the_running_block():
    device = SimulatedDevice(eager_compute=False)
    tier = PinnedTier(device)
    for value in range(6):
        tier.store(device.new_activation(value, 3))
    assert device.num_live_allocations == MAX_PENDING_OFFLOADS
    tier.settle()
    assert device.num_live_allocations == 0


def test_the_last_inputs_leave_the_device_as_backward_begins():
    device = SimulatedDevice(eager_compute=False)
    tier = PinnedTier(device)
    stored = [tier.store(device.new_activation(value, 3)) for value in range(2)]
    buffer = tier.allocate(12)
    loaded = tier.load(stored[1], buffer, tier.mark()).done
    tier.wait(loaded, buffer)
    tier.discard(stored[1], loaded)
    assert device.num_live_allocations == 1, "the buffer"


def test_current_stream_is_looked_up_at_each_call(monkeypatch):
    device = SimulatedDevice(eager_compute=False)
    lookups = []
    monkeypatch.setattr(device, "current_stream", lambda: lookups.append(1) or device.compute)
    tier = PinnedTier(device)
    assert not lookups
    stored = tier.store(device.new_activation(1.0, 3))
    assert len(lookups) == 1
    buffer = tier.allocate(12)
    tier.wait(tier.load(stored, buffer, tier.mark()).done, buffer)
    assert len(lookups) == 3


def test_poison_fills_freed_host_memory():
    device = SimulatedDevice(eager_compute=False)
    tier = PinnedTier(device, poison=True)
    stored = tier.store(device.new_activation(1.0, 3))
    stored.transfer.done.synchronize()
    assert stored.view(stored.place.memory).tolist() == [1.0] * 3
    tier.discard(stored, None)
    assert stored.view(stored.place.memory).isnan().all()


def test_a_discard_right_after_the_store_leaves_later_inputs_intact():
    """A block without gradient gives its place back while its copy is still queued."""
    device = SimulatedDevice(eager_compute=False)
    tier = PinnedTier(device)
    tier.discard(tier.store(device.new_activation(1.0, 3)), None)
    stored = tier.store(device.new_activation(2.0, 3))
    stored.transfer.done.synchronize()
    assert stored.view(stored.place.memory).tolist() == [2.0] * 3


def test_times_are_those_of_the_device():
    device = SimulatedDevice(eager_compute=False)
    tier = PinnedTier(device)
    stored = tier.store(device.new_activation(1.0, 3))
    assert tier.elapsed_ms(stored.transfer.started, stored.transfer.done) == 1.0


def test_a_new_step_finds_one_block_of_host_memory():
    device = SimulatedDevice(eager_compute=False)
    offloader = InputOffloader(PLAN, PinnedTier(device), num_buffers=2)
    for expected in (5, 1, 1):
        offloader.begin_step()
        for value in range(5):
            offloader.store(device.new_activation(value, 3), micro_batch=0)
        assert device.num_host_blocks == expected
        assert device.host_bytes == 5 * 4096
    offloader.close()


def test_close_returns_all_host_memory():
    device = SimulatedDevice(eager_compute=False)
    tier = PinnedTier(device)
    tier.store(device.new_activation(1.0, 3))
    assert device.host_bytes > 0
    tier.close()
    tier.close()
    assert device.host_bytes == 0
