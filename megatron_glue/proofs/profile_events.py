"""Turns what torch.profiler recorded into the spans that ``step_profile.py`` analyses.

On a CPU a step's time is the time of its operators on the host. On a GPU it is the time of kernels and copies on the
device, all streams together; of the host's side only waits for data and reads of device values are taken. Phases come
from the ranges of ``--nvtx-ranges``, which must be on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]

from megatron_glue.proofs.step_profile import Kind, Span
from megatron_glue.training.phases import PHASES

STEP_RANGE = "step"
LARGE_US = {"cpu": 100.0, "cuda": 20.0}
"""From this duration on an operator counts as compute whatever it is: the cost of launching it no longer matters."""

_PRODUCT = re.compile(
    r"^aten::(mm|addmm|bmm|baddbmm|addbmm|dot|mv|_grouped_mm|_scaled_mm|_scaled_dot_product\w*|_flash_attention\w*|"
    r"_efficient_attention\w*|convolution)$|gemm|gemv|cutlass|cublas|nvjet|wgmma|flash|fmha|grouped_mm|attention",
    re.IGNORECASE,
)
_COMMUNICATION = re.compile(r"^c10d::|^gloo:|^nccl|ncclDevKernel|ncclKernel|deep_?ep", re.IGNORECASE)
_HOST_READ = re.compile(
    r"^aten::(_local_scalar_dense|nonzero|bincount|_unique2?|unique_consecutive|unique_dim|masked_select)$"
)
"""What would make the host wait on a GPU."""
_SYNC = re.compile(r"^cuda(Stream|Device|Event)Synchronize$")
_COPY = re.compile(r"^Memcpy (HtoD|DtoH)")


class RecordedEvent(Protocol):
    """The part of ``torch.autograd.profiler_util.FunctionEvent`` that is read here."""

    name: str
    device_type: DeviceType
    is_user_annotation: bool
    cpu_children: list[Any]
    cpu_parent: Any
    time_range: Any


def spans_of(events: Iterable[RecordedEvent], device_type: str) -> list[Span]:
    """Keep what says something about a step.

    Args:
        events: From ``profiler.events()``; each step under a range named :data:`STEP_RANGE`.
        device_type: ``cpu`` or ``cuda``.

    Returns:
        Spans in the order of the events.
    """
    return list(_spans(events, device_type))


def phase_times_ms(events: Iterable[RecordedEvent], num_steps: int) -> dict[str, float]:
    """Host time in each phase per step, phases inside it included; in the order of a step.

    Args:
        events: From ``profiler.events()``.
        num_steps: Steps that were recorded.

    Returns:
        Milliseconds by phase; phases that did not occur are left out.
    """
    totals: dict[str, float] = defaultdict(float)
    for event in events:
        if event.is_user_annotation and event.device_type == DeviceType.CPU and event.name in PHASES:
            start_us, end_us = _times(event)
            totals[event.name] += (end_us - start_us) / 1e3
    return {phase: totals[phase] / num_steps for phase in PHASES if phase in totals}


def _spans(events: Iterable[RecordedEvent], device_type: str) -> Iterator[Span]:
    for event in events:
        is_host = event.device_type == DeviceType.CPU
        kind: Kind | None
        if event.is_user_annotation:
            kind = _kind_of_range(event.name, is_host=is_host, has_device=device_type != "cpu")
        elif is_host:
            kind = _kind_on_host(event, has_device=device_type != "cpu")
        else:
            kind = _kind_on_device(event.name)
        if kind is not None:
            yield Span(event.name, kind, *_times(event))


def _kind_of_range(name: str, *, is_host: bool, has_device: bool) -> Kind | None:
    """Ranges come twice on a GPU: as the host entered them, and around the kernels that were launched in them."""
    if name == STEP_RANGE:
        return "step" if is_host else None
    if name == "data wait":
        return "input" if is_host else None
    if name in ("clip", "optimizer"):
        return "optimizer" if is_host != has_device else None
    return "communication" if _COMMUNICATION.search(name) and is_host != has_device else None


def _kind_on_host(event: RecordedEvent, *, has_device: bool) -> Kind | None:
    if has_device:
        return "sync" if _SYNC.search(event.name) else None
    if _HOST_READ.search(event.name):
        return "sync"
    if _COMMUNICATION.search(event.name):
        return "communication"
    if _PRODUCT.search(event.name) and event.name.startswith("aten::"):
        return "product"
    # An operator's time is that of the ones it calls; a range of autograd calls some.
    is_leaf = not event.cpu_children and "::" in event.name
    return "operator" if is_leaf and not _is_part_of_another(event) else None


def _is_part_of_another(event: RecordedEvent) -> bool:
    """Whether an operator belongs to a product or to a read, whose time holds its own."""
    parent = event.cpu_parent
    while parent is not None:
        if not parent.is_user_annotation and (_PRODUCT.search(parent.name) or _HOST_READ.search(parent.name)):
            return True
        parent = parent.cpu_parent
    return False


def _kind_on_device(name: str) -> Kind:
    if _COPY.search(name):
        return "copy"
    if _COMMUNICATION.search(name):
        return "communication"
    return "product" if _PRODUCT.search(name) else "operator"


def _times(event: RecordedEvent) -> tuple[float, float]:
    return float(event.time_range.start), float(event.time_range.end)
