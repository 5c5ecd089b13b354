"""Answers of ranks are judged by the worst of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_glue.proofs.preflight import Answers, Check, Needs, as_record, is_fit, judge

NUMBERS = {
    "link": 900.0,
    "all-reduce": 800.0,
    "open files": 20_000.0,
    "checkpoint write": 400.0,
    "checkpoint read": 700.0,
    "free space": 5_000.0,
    "shared memory": 2_048.0,
}


def answer(host: str = "a", **numbers: float) -> Answers:
    spoken = {name.replace("_", " "): value for name, value in numbers.items()}
    return Answers(host, True, {"torch": "2.13.0"}, {**NUMBERS, **spoken})


def checks(answers: list[Answers], offsets_ms: list[float] | None = None, **needs: Any) -> dict[str, Check]:
    judged = judge(answers, offsets_ms or [0.0] * len(answers), Needs(Path("runs"), **needs))
    return {check.name: check for check in judged}


def test_machines_that_are_fit() -> None:
    found = checks([answer(), answer("b")], checkpoint_mb_per_s=100.0, free_mb=1000.0)
    assert is_fit(list(found.values()))
    assert found["checkpoint write"].is_ok
    assert found["link"].is_ok is None, "nothing is asked of it"
    assert found["offload write"].found == "nothing to measure"


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("link", {"link_mb_per_s": 100.0}),
        ("all-reduce", {"all_reduce_mb_per_s": 100.0}),
        ("checkpoint write", {"checkpoint_mb_per_s": 100.0}),
        ("checkpoint read", {"checkpoint_mb_per_s": 100.0}),
        ("free space", {"free_mb": 100.0}),
        ("shared memory", {"shm_mb": 100.0}),
        ("open files", {}),
    ],
)
def test_the_worst_rank_decides_and_is_named(name: str, needs: dict[str, Any]) -> None:
    slow = answer("b")
    slow.numbers[name] = 50.0
    found = checks([answer(), slow], **needs)
    assert [check.name for check in found.values() if check.is_ok is False] == [name]
    assert found[name].found.startswith("50")
    assert "rank 1 on b" in found[name].found
    assert not is_fit(list(found.values()))


def test_a_clock_that_is_ahead_is_named() -> None:
    found = checks([answer(), answer("b"), answer("c")], [0.0, 1.0, -700.0])["clock skew"]
    assert found.is_ok is False
    assert found.found == "701.0 ms (rank 2 on c)"
    assert checks([answer(), answer("b")], [0.0, 499.0])["clock skew"].is_ok
    assert checks([answer()])["clock skew"].is_ok is None


def test_a_mix_of_versions_is_named() -> None:
    other = answer("b")
    other.versions = {"torch": "2.12.0"}
    found = checks([answer(), other])["versions"]
    assert found.is_ok is False
    assert "rank 1 on b differs from rank 0 on a: torch 2.12.0 instead of 2.13.0" in found.found


def test_what_cannot_be_measured_fails_with_its_reason() -> None:
    broken = answer("b")
    del broken.numbers["checkpoint write"]
    broken.failures["checkpoint write"] = "runs: Read-only file system"
    found = checks([answer(), broken])["checkpoint write"]
    assert (found.is_ok, found.found) == (False, "rank 1 on b: runs: Read-only file system")


def test_many_ranks_need_many_files() -> None:
    answers = [answer()] * 2000
    assert checks(answers)["open files"].needed == "at least 41,024"
    assert checks(answers)["open files"].is_ok is False


def test_the_record() -> None:
    record = as_record(list(checks([answer()]).values()), 1)
    assert record["ok"] is True
    assert record["ranks"] == 1
    assert {"name": "link", "ok": None, "found": "900 MiB/s", "needed": ""} in record["checks"]
