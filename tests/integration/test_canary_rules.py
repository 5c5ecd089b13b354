"""Alerts about a trial of a new version name figures that are served and fire on what they are about."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_glue.training.telemetry.record import METRICS
from tests.support.source_tree import ROOT

FILE = ROOT / "docs/grafana/canary_rules.yaml"
RULES: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["groups"][0]["rules"]
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)
GOOD = {"up": "1", "tokens_per_second_per_gpu": "95", "memory_peak_bytes": "105", "host_reads_per_step": "2"}
STABLE = {"tokens_per_second_per_gpu": "100", "memory_peak_bytes": "100", "host_reads_per_step": "2"}
COUNTERS = ("skipped_steps_total", "loss_spikes_total", "failed_saves_total")


def test_rules_name_figures_that_are_served_and_choose_a_release() -> None:
    served = {f"megatron_glue_{spec.name}" for spec in METRICS}
    for rule in RULES:
        selected = re.findall(r'(\w+)\{release="(?:canary|stable)"\}', rule["expr"])
        assert selected, rule
        assert set(re.findall(r"megatron_glue_\w+", rule["expr"])) <= set(selected), "every figure is of a release"
        assert set(selected) <= served | {"up"}, rule


def alerts(folder: Path, values: str, *expected: str) -> None:
    """Let promtool play two hours of a stable job and a canary; ``expected`` alerts and no others must fire at the end.

    Args:
        folder: Room for promtool's file.
        values: ``figure=value``, of the canary where it is no good one; a counter steps up in its last minutes.
        *expected: Names of alerts.
    """
    canary = {**GOOD, **dict(pair.split("=") for pair in values.split())}
    series = [{"series": _series(name, "stable"), "values": f"{value}x120"} for name, value in STABLE.items()]
    for name, value in canary.items():
        played = f"0x110 {value}x10" if name in COUNTERS else f"{value}x120"
        series.append({"series": _series(name, "canary"), "values": played})
    named = [
        {"eval_time": "2h", "alertname": rule["alert"], "exp_alerts": [{}] if rule["alert"] in expected else []}
        for rule in RULES
    ]
    for entry, rule in zip(named, RULES, strict=True):
        for alert in entry["exp_alerts"]:
            is_of_model = " by (model) " in rule["expr"]
            alert["exp_labels"] = {"model": "m"} if is_of_model else {"model": "m", "release": "canary", "run": "c"}
            summary = rule["annotations"]["summary"]
            summary = summary.replace("{{ $labels.model }}", "m").replace("{{ $labels.run }}", "c")
            alert["exp_annotations"] = {"summary": summary}
    tests = {"rule_files": [str(FILE)], "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": named}]}
    (folder / "tests.yaml").write_text(yaml.safe_dump(tests))
    command = ["promtool", "test", "rules", "tests.yaml"]
    outcome = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def _series(name: str, release: str) -> str:
    full = name if name == "up" else f"megatron_glue_{name}"
    return f'{full}{{release="{release}", model="m", run="{release[0]}"}}'


@needs_promtool
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("skipped_steps_total=0", ()),
        ("up=0", ("CanaryIsGone",)),
        ("skipped_steps_total=1", ("CanarySkipsUpdates",)),
        ("loss_spikes_total=1", ("CanaryLossSpikes",)),
        ("failed_saves_total=1", ("CanarySavesFail",)),
        ("tokens_per_second_per_gpu=89", ("CanaryIsSlow",)),
        ("memory_peak_bytes=111", ("CanaryNeedsMemory",)),
        ("host_reads_per_step=3", ("CanaryReadsTheDevice",)),
    ],
)
def test_rules_fire_on_what_they_are_about(values: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    alerts(tmp_path, values, *expected)


@needs_promtool
def test_prometheus_reads_the_rules() -> None:
    outcome = subprocess.run(["promtool", "check", "rules", str(FILE)], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert f"{len(RULES)} rules found" in outcome.stdout
