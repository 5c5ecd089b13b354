"""Timeline events as a Chrome trace, which chrome://tracing and https://ui.perfetto.dev open.

One process per run that is compared, one thread per lane, so copies stand under the compute that hides them. It formats
what ``ActivationManager.timeline`` recorded and measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_glue.activation.statistics import TimelineEvent

LANES = ("compute", "reload", "offload")
"""From top to bottom."""


def chrome_trace(timelines: Mapping[str, Sequence[TimelineEvent]]) -> dict[str, Any]:
    """Turn timelines into the Trace Event Format.

    Args:
        timelines: Events by the name of the process that shows them.

    Returns:
        JSON values: complete events ("X") with begin and duration in microseconds, and names of processes and threads.
    """
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for thread, lane in enumerate(LANES):
            place = {"pid": process, "tid": thread}
            events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": lane}})
            events.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": thread}})
        events += [_complete_event(event, process) for event in timeline]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _complete_event(event: TimelineEvent, process: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{event.name} {event.call.block}",
        "cat": event.lane,
        "pid": process,
        "tid": LANES.index(event.lane),
        "ts": 1e3 * event.start_ms,
        "dur": 1e3 * (event.end_ms - event.start_ms),
        "args": {"step": event.step, "micro_batch": event.call.micro_batch, "block": event.call.block},
    }
