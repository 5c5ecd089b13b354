from __future__ import annotations

import json

import pytest

from megatron_glue.training.telemetry.record import METRICS, SPECS, MetricRecord
from tests.support.source_tree import ROOT

DASHBOARD = ROOT / "docs/grafana/megatron_glue.json"


def test_names_are_unique_and_what_is_unknown_is_refused() -> None:
    assert len(SPECS) == len(METRICS)
    for values, by_layer in (({"x": 1.0}, {}), ({"dead_experts": 1.0}, {}), ({}, {"loss": {0: 1.0}})):
        with pytest.raises(AssertionError):
            MetricRecord(1, 0.0, values, by_layer)


def test_the_documentation_has_every_figure_with_its_unit() -> None:
    page = (ROOT / "docs/monitoring.md").read_text()
    for spec in METRICS:
        layers = " by layer" if spec.is_by_layer else ""
        assert f"| `{spec.name}`{layers} | {spec.unit} | {spec.doc} |" in page


def test_the_dashboard_shows_every_figure_and_no_other() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    shown = {
        target["expr"].partition("{")[0].removeprefix("megatron_glue_")
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    }
    assert shown - {"iteration"} == set(SPECS)
    identities = [panel["id"] for panel in dashboard["panels"]]
    assert len(identities) == len(set(identities))
