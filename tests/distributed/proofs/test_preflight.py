"""Measurements between ranks, and a whole preflight of two of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_glue.config.environment import RankEnvironment
from megatron_glue.proofs import preflight_measures as measures
from megatron_glue.proofs.preflight import Needs, is_fit, preflight
from tests.support.processes import run_distributed

CPU = torch.device("cpu")


def measured_on_rank(rank: int, world_size: int, ahead_ns: int) -> dict[str, Any]:
    group, now = dist.group.WORLD, time.time_ns
    if rank == 1:
        time.time_ns = lambda: now() + ahead_ns
    offsets_ms = measures.clock_offsets_ms(group)
    time.time_ns = now
    return {
        "offsets": offsets_ms,
        "rates": [measures.ring_rate(1 << 16, CPU, group), measures.all_reduce_rate(1 << 16, CPU, group)],
    }


def fit_on_rank(rank: int, world_size: int, folder: str) -> tuple[bool, list[str]]:
    environment = RankEnvironment(rank, rank, world_size, world_size, "localhost", "torchrun", 29500)
    needs = Needs(Path(folder) / "not yet there", Path(folder), message_mb=1, file_mb=1, shm_mb=0.0)
    checks = preflight(needs, environment, CPU, dist.group.WORLD)
    return is_fit(checks), [check.name for check in checks if check.found == "nothing to measure"]


def test_clocks_and_rates() -> None:
    """An hour is far beyond what a busy machine adds."""
    for found in run_distributed(measured_on_rank, 2, 3_600_000_000_000):
        assert found["offsets"][0] == 0.0
        assert abs(found["offsets"][1] - 3_600_000) < 60_000
        assert all(rate > 0 for rate in found["rates"])


def test_two_ranks_of_one_machine(tmp_path: Path) -> None:
    answers = run_distributed(fit_on_rank, 2, str(tmp_path))
    assert answers[0] == answers[1], "all ranks judge alike"
    assert answers[0][1] == [], "everything was measured"
    assert list(tmp_path.iterdir()) == [], "no file stays"


def test_a_rank_on_its_own_has_no_link() -> None:
    assert measures.clock_offsets_ms(None) == [0.0]
    assert measures.ring_rate(1024, CPU, None) is None
    assert measures.all_reduce_rate(1024, CPU, None) is None
