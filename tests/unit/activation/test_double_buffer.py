"""The reload state machine under randomised schedules, and its decisions about room."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_glue.activation.double_buffer import ReloadBuffers
from megatron_glue.activation.offloader import InputOffloader
from megatron_glue.activation.pinned_tier import PinnedTier
from megatron_glue.activation.plan import ActivationPlan
from megatron_glue.activation.statistics import BlockCall, StatisticsRecorder
from tests.support.simulated_device import SimulatedDevice

PAGE = 4096
CALL = BlockCall(micro_batch=0, block=0)
PAGE_ELEMENTS = PAGE // 4


class ReloadMachine(RuleBasedStateMachine):
    """Any order of forward, backward and reset on the host, against any order of streams on the device.

    Freed memory is NaN. Kernels check what they read when they run, which may be long after the host queued them: a
    buffer that is read early, or filled again while it is in use, shows as a violation.
    """

    @initialize(num_buffers=st.sampled_from([1, 2]), num_pages=st.sampled_from([0, 1, 2, 3, 4]))
    def build(self, num_buffers, num_pages):
        self.device = SimulatedDevice(eager_compute=False)
        plan = ActivationPlan(recompute=True, offload=True, buffer_size_bytes=num_pages * PAGE)
        self.bound_bytes = num_pages * PAGE
        self.offloader = InputOffloader(plan, PinnedTier(self.device), num_buffers)
        self.kept: dict[int, list] = {}
        self.in_use: list = []
        self.num_values = 0

    @rule(micro_batch=st.integers(0, 2), num_pages=st.sampled_from([1, 1, 1, 2]))
    def forward(self, micro_batch, num_pages):
        self.num_values += 1
        x = self.device.new_activation(self.num_values, num_pages * PAGE_ELEMENTS - 1)
        claim = self.offloader.store(x, micro_batch)
        self.device.check(x, self.num_values)
        self.kept.setdefault(micro_batch, []).append((claim, self.num_values))

    @rule()
    def end_forward(self):
        self.offloader.prefetch_first()

    @precondition(lambda self: any(self.kept.values()))
    @rule(data=st.data())
    def begin_backward_of_a_block(self, data):
        micro_batch = data.draw(st.sampled_from([key for key, chain in self.kept.items() if chain]))
        claim, value = self.kept[micro_batch].pop()
        buffer = claim.fetch()
        self.device.check(buffer, value)
        self.in_use.append((claim, buffer, value))

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def end_backward_of_a_block(self, data):
        claim, buffer, value = self.in_use.pop(data.draw(st.integers(0, len(self.in_use) - 1)))
        self.device.check(buffer, value)
        claim.release()

    @precondition(lambda self: any(self.kept.values()))
    @rule(data=st.data())
    def skip_a_block_without_gradient(self, data):
        micro_batch = data.draw(st.sampled_from([key for key, chain in self.kept.items() if chain]))
        claim, _ = self.kept[micro_batch].pop(data.draw(st.integers(0, len(self.kept[micro_batch]) - 1)))
        if data.draw(st.booleans()):
            claim.release()  # its graph was dropped early; else it stays until the reset

    @rule()
    def reset(self):
        """Also after an exception mid-backward: blocks that were in use are cut off."""
        self.offloader.reset()
        self.kept.clear()
        self.in_use.clear()
        assert self.offloader.num_tracked == 0

    @rule(name=st.sampled_from(["compute", "offload", "reload"]), num_items=st.integers(1, 9))
    def device_advances(self, name, num_items):
        for _ in range(num_items):
            self.device.advance_if_possible(name)

    @invariant()
    def no_kernel_read_a_wrong_value(self):
        if hasattr(self, "device"):
            assert self.device.violations == []
            buffers = self.offloader._buffers
            assert buffers.num_buffers <= 2
            if self.bound_bytes and not self.in_use:
                assert buffers.held_bytes <= self.bound_bytes

    def teardown(self):
        if hasattr(self, "device"):
            self.device.run_by_priority(["reload", "compute", "offload"])
            assert self.device.violations == []
            self.offloader.close()
            assert self.device.host_bytes == 0


TestReloadMachine = pytest.mark.filterwarnings("ignore")(ReloadMachine.TestCase)
TestReloadMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def make_buffers(num_wanted=2, max_bytes=0, poison=False):
    device = SimulatedDevice(eager_compute=True)
    tier = PinnedTier(device)
    statistics = StatisticsRecorder(tier.mark, tier.elapsed_ms, record_timeline=False)
    return device, tier, ReloadBuffers(tier, statistics, num_wanted=num_wanted, max_bytes=max_bytes, poison=poison)


def store(device, tier, buffers, value=1.0, num_elements=PAGE_ELEMENTS):
    stored = tier.store(device.new_activation(value, num_elements))
    buffers.expect(stored.num_bytes)
    return stored


def test_next_input_is_started_before_the_current_one_is_waited_for(monkeypatch):
    device, tier, buffers = make_buffers()
    first, second = (store(device, tier, buffers, value) for value in (1.0, 2.0))
    calls = []
    load, wait = tier.load, tier.wait
    monkeypatch.setattr(tier, "load", lambda stored, *rest: calls.append(("load", stored)) or load(stored, *rest))
    monkeypatch.setattr(tier, "wait", lambda *rest: calls.append(("wait", None)) or wait(*rest))
    buffers.acquire(second, first)
    assert calls == [("load", second), ("load", first), ("wait", None)]
    buffers.release(second, CALL)
    calls.clear()
    buffers.acquire(first, None)
    assert calls == [("wait", None)]


def test_single_buffer_copies_then_computes(monkeypatch):
    device, tier, buffers = make_buffers(num_wanted=1)
    first, second = (store(device, tier, buffers, value) for value in (1.0, 2.0))
    loads = []
    load = tier.load
    monkeypatch.setattr(tier, "load", lambda stored, *rest: loads.append(stored) or load(stored, *rest))
    buffers.prefetch(second)
    assert loads == []
    buffers.acquire(second, first)
    buffers.release(second, CALL)
    assert loads == [second]
    assert buffers.held_bytes == PAGE


@pytest.mark.parametrize(
    ("max_bytes", "num_buffers", "words"),
    [
        (0, 2, "two reload buffers"),
        (2 * PAGE, 2, "two reload buffers"),
        (2 * PAGE - 1, 1, "one reload buffer (inputs of 0.0 MiB"),
        (PAGE, 1, "copies are not hidden"),
        (PAGE - 1, 0, "no reload buffer"),
    ],
)
def test_bound_decides_the_number_of_buffers_and_says_so(max_bytes, num_buffers, words, caplog):
    device, tier, buffers = make_buffers(max_bytes=max_bytes)
    values = [store(device, tier, buffers, float(value)) for value in range(4)]
    assert buffers.num_buffers == num_buffers
    assert words in buffers.describe()
    assert ("reload buffer" in caplog.text) == (num_buffers < 2)
    for value in reversed(range(4)):
        x = buffers.acquire(values[value], values[value - 1] if value else None)
        assert (x == value).all()
        assert max_bytes == 0 or buffers.held_bytes <= max_bytes
        buffers.release(values[value], CALL)


def test_larger_inputs_later_may_leave_room_for_one_buffer_only():
    device, tier, buffers = make_buffers(max_bytes=3 * PAGE)
    small, large = store(device, tier, buffers, 1.0), store(device, tier, buffers, 2.0, 2 * PAGE_ELEMENTS)
    assert buffers.num_buffers == 1
    for stored, value in ((large, 2.0), (small, 1.0)):
        assert (buffers.acquire(stored, None) == value).all()
        buffers.release(stored, CALL)
    assert buffers.held_bytes == 2 * PAGE


@pytest.mark.parametrize(("max_bytes", "expected"), [(0, [1, 2, 2]), (4096, [1, 1, 1]), (1, [0, 0, 0])])
def test_another_number_of_buffers_keeps_to_the_bound_and_frees_what_is_too_much(max_bytes, expected):
    _, _, buffers = make_buffers(max_bytes=max_bytes)
    buffers.expect(4096)
    counts = []
    for num_wanted in (1, 2, 2):
        buffers.resize(num_wanted)
        counts.append(buffers.num_buffers)
    assert counts == expected


def test_fetched_ahead_but_not_wanted_makes_room_and_can_still_be_fetched():
    device, tier, buffers = make_buffers()
    stored = [store(device, tier, buffers, float(value)) for value in range(4)]
    buffers.prefetch(stored[0])
    buffers.prefetch(stored[1])
    assert (buffers.acquire(stored[2], None) == 2.0).all()
    assert (buffers.acquire(stored[3], None) == 3.0).all()
    x = buffers.acquire(stored[0], None)  # both buffers are in use: memory of its own
    assert (x == 0.0).all()
    for item in (stored[3], stored[0], stored[2]):
        buffers.release(item, CALL)
    assert (buffers.acquire(stored[1], None) == 1.0).all()
    assert buffers.held_bytes == 2 * PAGE


def test_poison_fills_fresh_and_freed_buffers():
    device, tier, buffers = make_buffers(poison=True)
    stored = store(device, tier, buffers, 1.0)
    x = buffers.acquire(stored, None)
    assert (x == 1.0).all()
    buffers.release(stored, CALL)
    assert x.isnan().all()


@pytest.mark.parametrize("how", ["evicted", "dropped"])
def test_buffer_that_is_replaced_by_a_larger_one_is_no_longer_being_filled(how):
    """The device is far behind the host: the copy into the small buffer has not begun when the buffer is freed."""
    device = SimulatedDevice(eager_compute=False)
    tier = PinnedTier(device)
    statistics = StatisticsRecorder(tier.mark, tier.elapsed_ms, record_timeline=False)
    buffers = ReloadBuffers(tier, statistics, num_wanted=2)
    large = tier.store(device.new_activation(7.0, 2 * PAGE_ELEMENTS))
    small = [store(device, tier, buffers, float(value)) for value in range(2)]
    for stored in small:
        buffers.prefetch(stored)
    buffers.expect(large.num_bytes)
    if how == "dropped":
        for stored in small:
            buffers.drop(stored)
    device.check(buffers.acquire(large, None), 7.0)
    buffers.release(large, CALL)
    device.run_by_priority(["compute", "offload", "reload"])
    assert device.violations == []
