"""A trace has one lane under the other, in microseconds."""

from __future__ import annotations

import json

from megatron_glue.activation.chrome_trace import chrome_trace
from megatron_glue.activation.statistics import BlockCall, TimelineEvent


def test_events_stand_in_their_lanes_in_microseconds():
    call = BlockCall(micro_batch=1, block=2)
    events = [
        TimelineEvent("backward", "compute", call, 3, 1.5, 4.0),
        TimelineEvent("reload", "reload", call, 3, 1.0, 1.25),
    ]
    trace = json.loads(json.dumps(chrome_trace({"one": [], "two": events})))
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(bar["name"], bar["pid"], bar["tid"], bar["ts"], bar["dur"]) for bar in bars] == [
        ("backward 2", 1, 0, 1500.0, 2500.0),
        ("reload 2", 1, 1, 1000.0, 250.0),
    ]
    assert bars[0]["args"] == {"step": 3, "micro_batch": 1, "block": 2}
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["one", "two"]
