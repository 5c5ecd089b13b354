"""10,000 random schedules of the reload state machine, none of which reads a slot early; and what would be found."""

from __future__ import annotations

import logging

import pytest

from megatron_glue.activation.offloader import InputOffloader
from megatron_glue.activation.pinned_tier import PinnedTier
from megatron_glue.activation.plan import ActivationPlan
from tests.support.reload_schedules import wrong_schedules
from tests.support.simulated_device import EDGES, Edge, SimulatedDevice

NUM_SCHEDULES = 10_000
NUM_BLOCKS = 5


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_no_schedule_reads_a_slot_early():
    assert wrong_schedules(range(NUM_SCHEDULES)) == []


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES.keys())
def test_schedules_find_a_missing_event(edge: Edge):
    assert wrong_schedules(range(300), [edge]) != []


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_a_host_sync_in_the_middle_of_backward_does_not_serialise_it(num_buffers):
    """Somebody reads a device value inside a block's backward: the host waits for compute and issues nothing.

    With two buffers the next copy was issued before that block began, so it runs while the host waits.
    """
    device = SimulatedDevice(eager_compute=False)
    plan = ActivationPlan(recompute=True, offload=True, double_buffer=True)
    offloader = InputOffloader(plan, PinnedTier(device), num_buffers)
    claims = [offloader.store(device.new_activation(value, 4), micro_batch=0) for value in range(NUM_BLOCKS)]
    offloader.prefetch_first()
    reload = device.streams["reload"]
    num_hidden = 0
    for value in reversed(range(NUM_BLOCKS)):
        buffer = claims[value].fetch()
        device.check(buffer, value)
        device.compute.synchronize()
        num_copies_waiting = sum(callable(item) for item in reload.queue)
        while reload.queue and not reload.is_blocked:
            device.advance(reload)
        num_hidden += num_copies_waiting - sum(callable(item) for item in reload.queue)
        device.check(buffer, value)
        claims[value].release()
    device.run_by_priority(())
    assert device.violations == []
    assert num_hidden == (NUM_BLOCKS - 1 if num_buffers == 2 else 0)
