"""A record of a run that never was, for tests of what is done with records."""

from __future__ import annotations

from megatron_glue.proofs.baselines import Record

RECORD = Record(
    "0.1.0-abc",
    {
        "run": {"steps": 2, "ranks": 1},
        "losses": [5.0, 1 / 3],
        "grad_norms": [1.0, 0.5],
        "heldout": [4.0],
        "outputs": {"layer 0, before training": [1.0]},
        "tokens_per_second": 10.0,
        "peak_memory_bytes": 2**20,
        "step_ms": [1.0],
    },
    {"started": "2026-01-02T00:00:00Z", "software": {"torch": "2", "Python": "3.12.1"}, "config": {}},
    {"torch": "torch==2"},
    "model: {}\n",
)
