"""The comparison beside other frameworks: who takes part, on which data, and what comes out."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.programs import load_program

peers = load_program("tools/bench/peers.py")
TINY = peers.BenchSpec(
    ffn_hidden_size=32, vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, row_tokens=32, num_threads=1
)
OWN_MATH = (peers.GEMM_TORCH, peers.GEMM_BEST, peers.OWN)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tools/bench/peers.py", *words])
    return peers.main()


def test_contestants_take_turns_and_absent_ones_say_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = peers.Contestant("somebody", "huggingface.py", "llama/-/fused")
    packed = replace(TINY, num_experts=4, top_k=2, num_rows=1, row_tokens=64, document_tokens=(5, 20))
    cases = {"tiny": peers.Case(packed, (*OWN_MATH, absent, peers.MEGATRON))}
    monkeypatch.setattr(peers, "CASES", cases)
    words = [
        "--cases",
        "tiny",
        "--rounds",
        "2",
        "--warmup",
        "1",
        "--threads",
        "1",
        "--json",
        str(tmp_path / "peers.json"),
        "--markdown",
        str(tmp_path / "peers.md"),
        "--machine",
        "a test",
    ]
    assert run(monkeypatch, *words) == 0
    page = (tmp_path / "peers.md").read_text()
    assert "a test" in page
    assert "1 x 64 tokens, packed from documents of 5-20; 1 process(es)." in page
    assert "| somebody | absent: transformers cannot be imported" in page
    rows = {row["name"]: row for row in json.loads((tmp_path / "peers.json").read_text())["tiny"]}
    own = rows[peers.OURS]
    assert len(own["times_s"]) == 2
    assert own["ratio_to_ours"] == 1.0
    assert own["first_loss"] == pytest.approx(np.log(64), rel=0.05)
    assert own["peak_mib"] > 50
    assert rows["somebody"]["absent"].startswith("transformers cannot be imported")
    assert rows[peers.MEGATRON.name]["absent"] == "packed rows need Transformer Engine"
    assert "absent: transformers cannot be imported" in capsys.readouterr().out


def test_two_processes_split_the_experts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = replace(TINY, num_experts=4, top_k=2, world_size=2)
    monkeypatch.setattr(peers, "CASES", {"ep": peers.Case(spec, (*OWN_MATH, peers.MEGATRON))})
    words = ["--cases", "ep", "--rounds", "1", "--warmup", "0", "--without-peers", "--row-tokens", "16"]
    assert run(monkeypatch, *words, "--json", str(tmp_path / "p.json")) == 0
    own = next(row for row in json.loads((tmp_path / "p.json").read_text())["ep"] if row["name"] == peers.OURS)
    assert own["tokens_per_s"] == pytest.approx(2 * 32 / own["median_s"])
    assert own["first_loss"] == pytest.approx(np.log(64), rel=0.05)


def test_every_implementation_draws_the_same_data() -> None:
    protocol = sys.modules["protocol"]
    spec = replace(TINY, document_tokens=(3, 9))
    for _ in range(2):
        first, second = (protocol.draw_batches(spec, rank=1) for _ in range(2))
        (ids, lengths), (same_ids, same_lengths) = next(first), next(second)
        assert np.array_equal(ids, same_ids)
        assert lengths == same_lengths
        assert [sum(row) for row in lengths] == [spec.row_tokens] * spec.num_rows
    assert not np.array_equal(ids, next(protocol.draw_batches(spec, rank=0))[0])
    assert protocol.BenchSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("words", "named"),
    [(("--rounds", "0"), "--rounds"), (("--row-tokens", "1"), "--row-tokens"), (("--cases", "nothing"), "--cases")],
)
def test_wrong_use_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str
) -> None:
    assert run(monkeypatch, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert named in line


def test_products_are_counted_once_for_each_direction() -> None:
    gemm = sys.modules["gemm"]
    assert gemm.num_flops(TINY) == 6 * 64 * (2 * (32 * 96 + 32 * 32 + 32 * 64 + 32 * 32) + 32 * 64)
    assert gemm.num_attention_flops(TINY) == 6 * 2 * 64 * 32 * 32


@pytest.mark.parametrize(
    ("absent", "ending"), [("", "smallest; with the double buffer 40% less memory than without"), ("why", "smallest")]
)
def test_the_verdict_has_what_the_double_buffer_saves(absent: str, ending: str) -> None:
    row = {"absent": "", "is_peer": False, "ratio_to_ours": 1.0, "peak_mib": 500.0}
    peer = {**row, "name": "peer", "is_peer": True, "ratio_to_ours": 1.25, "peak_mib": 1000.0}
    offloaded = {**row, "name": peers.OURS_OFFLOADED, "peak_mib": 300.0, "absent": absent}
    told = peers.verdict([{**row, "name": peers.OURS}, offloaded, peer])
    assert told.startswith("1.25x the speed of the fastest peer (peer), 0.50x the memory of the ")
    assert told.endswith(ending)
    assert peers.verdict([{**row, "name": peers.OURS}]) == ""
