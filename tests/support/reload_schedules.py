"""Seeded random schedules of the reload state machine on the simulated device, with poisoned slots.

One schedule is a few forward and backward passes of blocks, in any order that a training step may have (several
micro-batches in flight, blocks without gradient, a reset in the middle), while the device's streams run ahead or fall
behind at random. When a block gives its slot back, a kernel that fills the slot with NaN is queued first; freed memory
is NaN too. So whoever reads a slot before its copy ended, or after it was given to another input, reads a wrong value.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch

from megatron_glue.activation.double_buffer import POISON_BYTE
from megatron_glue.activation.offloader import InputOffloader, OffloadedInput
from megatron_glue.activation.pinned_tier import PinnedTier
from megatron_glue.activation.plan import ActivationPlan
from tests.support.simulated_device import Edge, SimulatedDevice

PAGE = 4096
NUM_ACTIONS = 14
STREAMS = ("compute", "offload", "reload", "compute2")


class ReloadSchedule:
    """One schedule.

    Args:
        seed: Decides everything.
        ignored_edges: Waits between streams that are left out.
    """

    def __init__(self, seed: int, ignored_edges: Iterable[Edge] = ()) -> None:
        self._random = random.Random(seed)
        self.device = SimulatedDevice(eager_compute=False, ignored_edges=ignored_edges)
        draw = self._random
        plan = ActivationPlan(recompute=True, offload=True, buffer_size_bytes=draw.choice((0, 0, 0, PAGE, 3 * PAGE)))
        self._max_inflight = draw.choice((1, 2, 2, 2))
        tier = PinnedTier(self.device, max_inflight=self._max_inflight)
        self.offloader = InputOffloader(plan, tier, num_buffers=draw.choice((1, 2, 2, 2)))
        self._kept: dict[int, list[tuple[OffloadedInput, int]]] = {}
        self._num_values = 0

    def run(self) -> list[str]:
        """Run it to its end and return what went wrong."""
        actions = (self._forward, self._forward, self._backward, self._backward, self._prefetch, self._skip)
        for _ in range(NUM_ACTIONS):
            self._random.choice(actions)()
            if self._random.random() < 0.08:
                self._reset()
            self._advance()
        while any(self._kept.values()):
            self._backward()
        self.offloader.reset()
        names = [name for name in STREAMS if name in self.device.streams]
        self._random.shuffle(names)
        self.device.run_by_priority(names)
        return self.device.violations

    def _reset(self) -> None:
        """The step is over, perhaps in the middle; the next one may compute on a stream that is not ordered with it."""
        self.offloader.reset()
        self._kept.clear()
        if self._max_inflight == 2 and "compute2" not in self.device.streams:
            self.device.use_another_compute_stream()

    def _forward(self) -> None:
        self._num_values += 1
        micro_batch = self._random.randrange(2)
        num_bytes = self._random.choice((PAGE, PAGE, PAGE, 2 * PAGE))
        x = self.device.new_activation(self._num_values, num_bytes // 4)
        claim = self.offloader.store(x, micro_batch)
        self._kept.setdefault(micro_batch, []).append((claim, self._num_values))

    def _backward(self) -> None:
        chains = [chain for chain in self._kept.values() if chain]
        if not chains:
            return
        claim, value = self._random.choice(chains).pop()
        buffer = claim.fetch()
        self.device.check(buffer, value)
        self._advance()
        self.device.check(buffer, value)
        self.device.fill(buffer, POISON_BYTE)
        claim.release()

    def _prefetch(self) -> None:
        self.offloader.prefetch_first()

    def _skip(self) -> None:
        """A block without gradient gives its claim up, any one of its micro-batch."""
        chains = [chain for chain in self._kept.values() if chain]
        if chains and self._random.random() < 0.3:
            chain = self._random.choice(chains)
            claim, _ = chain.pop(self._random.randrange(len(chain)))
            claim.release()

    def _advance(self) -> None:
        name = self._random.choice(STREAMS)
        if name in self.device.streams:
            for _ in range(self._random.randrange(6)):
                self.device.advance_if_possible(name)


def wrong_schedules(seeds: Iterable[int], ignored_edges: Iterable[Edge] = ()) -> list[int]:
    """The seeds whose schedules read a wrong value somewhere."""
    edges = tuple(ignored_edges)
    with torch.no_grad():
        return [seed for seed in seeds if ReloadSchedule(seed, edges).run()]
