"""The report of tools/bench/gpu.sh, from files as its sections write them."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.support.programs import load_program

DEVICE = {
    "date": "2026-11-30",
    "name": "NVIDIA X",
    "compute_capability": "9.0",
    "memory_gib": 79.6,
    "torch": "2.13.0+cu130",
    "cuda": "13.0",
    "python": "3.12.1",
}
VARIANT = {
    "variant": "all three",
    "median_step_ms": 12.34,
    "ratio": 1.5,
    "ratio_min": 1.4,
    "ratio_max": 1.6,
    "tokens_per_second": 123456.7,
    "peak_bytes_of_a_step": 3 * 2**20,
    "host_reads": 0,
    "reload_wait_ms": 0.25,
    "overlap_efficiency": 0.97,
    "loss_difference": 1e-7,
}
BUFFERS = {
    "median_step_ms": 20.0,
    "copy_ms": [4.0, 6.0],
    "compute_ms": [10.0],
    "reload_wait_ms": [0.0],
    "overlap_efficiency": 1.0,
}
FILES = {
    "sync_audit": {
        "overruns": ["moe, rank 0: layer 1 has 2"],
        "models": [{"model": "moe", "ranks": [{"reads": [{"layer": 1, "count": 2}, {"layer": -1, "count": 5}]}]}],
    },
    "ablation_glue_bound": {"title": "16 layers", "variants": [VARIANT], "complaints": []},
    "ablation_fine_tuning": {"title": "24 layers", "variants": [VARIANT], "complaints": ["losses differ"]},
    "timeline": {"title": "12 layers", "one buffer": BUFFERS, "two buffers": BUFFERS, "gain": 1.25},
    "operators": {
        "title": "fp32 on cuda",
        "rows": [
            {
                "operator": "grouping",
                "sizes": "T4",
                "way": "one pass",
                "median_ms": 0.1,
                "min_ms": 0.05,
                "max_ms": 0.2,
                "ratio": 1.0,
                "difference": 0.0,
            }
        ],
    },
}


@pytest.fixture
def report(monkeypatch, tmp_path):
    """Run the program over files in a folder, return its exit code and the Markdown."""

    def run(*words, files):
        (tmp_path / "sections.tsv").write_text("tests\tok\t12\tpytest\ntimeline\texit code 1\t3\ttimeline\n")
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        monkeypatch.setattr(sys, "argv", ["gpu_report.py", *words, str(tmp_path)])
        code = load_program("tools/bench/gpu_report.py").main()
        table = tmp_path / "gpu.md"
        return code, table.read_text() if table.exists() else ""

    return run


def test_all_figures_stand_under_date_and_device(report):
    code, text = report(files={"device": DEVICE, **FILES})
    assert code == 0
    assert text.startswith("# NVIDIA X, 2026-11-30\n\nCompute capability 9.0, 80 GiB, torch 2.13.0+cu130, CUDA 13.0")
    for line in (
        "| timeline | exit code 1 | 3 |",
        "| moe | 2 | 5 |",
        "FAILED moe, rank 0: layer 1 has 2",
        "| all three | 12.3 | 1.50x | 1.40-1.60 | 123,457 | 3 | 0 | 0.2 | 97% | 1.0e-07 |",
        "FAILED losses differ",
        "| two buffers | 20.0 | 5.0 | 10.0 | 0.0 | 100% |",
        "Two buffers: 1.25x the speed of one.",
        "| grouping (T4): one pass | 0.100 | 0.050-0.200 | 1.00x | 0.0e+00 |",
    ):
        assert f"\n{line}\n" in text, line


def test_a_section_without_figures_has_its_status_only(report):
    code, text = report(files={"device": DEVICE})
    assert code == 0
    assert text.count("\n## ") == 0
    assert "| tests | ok | 12 |" in text


def test_the_device_is_described_where_there_is_one(report, monkeypatch, tmp_path):
    properties = SimpleNamespace(name="NVIDIA X", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert report("--probe", files={}) == (0, "")
    device = json.loads((tmp_path / "device.json").read_text())
    assert device.keys() == DEVICE.keys()
    assert (device["name"], device["compute_capability"], device["memory_gib"]) == ("NVIDIA X", "9.0", 80.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_there_is_none_it_is_one_line(report, capsys):
    assert report("--probe", files={}) == (2, "")
    assert capsys.readouterr().err.count("\n") == 1
