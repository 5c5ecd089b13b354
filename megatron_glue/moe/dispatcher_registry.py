"""Which dispatchers there are, and what each needs: the table behind ``--moe-token-dispatcher-type``.

Asked once per MoE layer when the model is built. The dispatchers themselves are in files of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup

from megatron_glue.backends.deepep import DeepEPBuffers, why_not_deepep
from megatron_glue.backends.permutation import TORCH_PERMUTATION, RowPermutation
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.moe.dispatcher import Dispatcher, LocalDispatcher
from megatron_glue.moe.dispatcher_alltoall import AllToAllDispatcher
from megatron_glue.moe.dispatcher_bounded import BoundedDispatcher
from megatron_glue.moe.dispatcher_deepep import deepep_dispatcher
from megatron_glue.moe.dispatcher_tokens import all_gather_dispatcher
from megatron_glue.ops.host_reader import HostReader


@dataclass(frozen=True, eq=False)
class DispatcherNeeds:
    """What a layer wants of its dispatcher.

    Attributes:
        group: Ranks that share the experts or hold parts of them; ``None`` for one.
        num_experts: E.
        host_reader: Counts reads of device values.
        device: Where the model computes.
        dtype: Compute dtype.
        num_replicas: Ranks that hold a part of the same experts; they stand next to each other in the group.
        num_chunks: Exchanges of rows each way that overlap with the experts.
        capacity_factor: Of exchanges of fixed size in training steps; ``None`` for none.
        deepep_buffers: Shared by all layers.
        permutation: Moves rows into expert order and back.
    """

    group: ProcessGroup | None
    num_experts: int
    host_reader: HostReader
    device: torch.device
    dtype: torch.dtype
    num_replicas: int = 1
    num_chunks: int = 1
    capacity_factor: float | None = None
    deepep_buffers: DeepEPBuffers = field(default_factory=DeepEPBuffers)
    permutation: RowPermutation = TORCH_PERMUTATION


@dataclass(frozen=True)
class DispatcherEntry:
    """One kind of dispatcher.

    Attributes:
        load: Builds it for a group of ranks.
        why_not: Says why it cannot serve these needs, or returns an empty string.
    """

    load: Callable[[ProcessGroup, DispatcherNeeds], Dispatcher]
    why_not: Callable[[DispatcherNeeds], str]


def _all_to_all(group: ProcessGroup, needs: DispatcherNeeds) -> Dispatcher:
    exact = AllToAllDispatcher(
        group, needs.num_experts, needs.host_reader, needs.num_replicas, needs.num_chunks, needs.permutation
    )
    return exact if needs.capacity_factor is None else BoundedDispatcher(exact, needs.capacity_factor)


def _all_gather(group: ProcessGroup, needs: DispatcherNeeds) -> Dispatcher:
    return all_gather_dispatcher(group, needs.num_experts, needs.num_replicas, needs.permutation)


def _deepep(group: ProcessGroup, needs: DispatcherNeeds) -> Dispatcher:
    return deepep_dispatcher(group, needs.num_experts, needs.host_reader, needs.deepep_buffers, needs.permutation)


DISPATCHERS: dict[str, DispatcherEntry] = {
    "alltoall": DispatcherEntry(_all_to_all, lambda needs: ""),
    "allgather": DispatcherEntry(_all_gather, lambda needs: ""),
    "deepep": DispatcherEntry(_deepep, lambda needs: why_not_deepep(needs.device, needs.dtype, needs.num_replicas)),
}
"""Name -> entry."""


def load_dispatcher(name: str, needs: DispatcherNeeds) -> Dispatcher:
    """Build the dispatcher of one layer.

    Args:
        name: As in the configuration; on one rank every name means the dispatcher that sends nothing.
        needs: See :class:`DispatcherNeeds`.

    Returns:
        The dispatcher.

    Raises:
        ConfigError: If the named one cannot be had here, with the reason.
    """
    if needs.group is None:
        return LocalDispatcher(needs.num_experts, needs.permutation)
    entry = DISPATCHERS[name]
    if obstacle := entry.why_not(needs):
        usable = [other for other, each in DISPATCHERS.items() if not each.why_not(needs)]
        raise ConfigError(flag_of("moe_token_dispatcher_type"), name, obstacle, f"use one of {usable}")
    return entry.load(needs.group, needs)
