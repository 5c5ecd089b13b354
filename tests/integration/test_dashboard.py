"""The Grafana dashboard asks for nothing that the endpoint does not serve, and a real Prometheus answers all of it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_glue.parallel.local_ranks import free_port
from megatron_glue.training.telemetry.record import METRICS, MetricRecord
from megatron_glue.training.telemetry.sinks.prometheus import PrometheusSink
from tests.support.source_tree import ROOT

DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana/megatron_glue.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
SHOWN = [panel for panel in PANELS if panel["type"] != "row"]
EXPRESSIONS = sorted({target["expr"] for panel in SHOWN for target in panel["targets"]})
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
SCHEMA_VERSION = 39
"""Of Grafana 10.4; later ones bring a dashboard up to date when they read it."""
RUN = "a run"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[PrometheusSink]:
    """The exporter of a run, with every figure that there is."""
    sink = PrometheusSink("127.0.0.1", 0, RUN)
    values = {spec.name: float(at) for at, spec in enumerate(METRICS) if not spec.is_by_layer}
    by_layer = {spec.name: {1: 1.0, 3: 2.0} for spec in METRICS if spec.is_by_layer}
    sink.write(MetricRecord(7, 1.0, values, by_layer))
    yield sink
    sink.close()


@pytest.fixture(scope="module")
def page(endpoint: PrometheusSink) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10) as answer:
        return answer.read().decode()


@pytest.fixture(scope="module")
def labels(page: str) -> dict[str, set[str]]:
    """Label names of each figure that was scraped."""
    found: dict[str, set[str]] = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, rest = line.partition("{")
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', rest.rpartition("}")[0]))
    return found


def _selectors(expression: str) -> list[tuple[str, set[str]]]:
    """Names of figures in an expression, each with the labels that it is chosen by."""
    found = []
    for name, matchers in re.findall(r"([A-Za-z_:][\w:]*)(\{[^}]*\})?", re.sub(r'"[^"]*"', '""', expression)):
        if name.startswith("megatron_glue_") or matchers:
            found.append((name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))))
    return found


def test_expressions_name_only_what_is_served(labels: dict[str, set[str]]) -> None:
    for expression in EXPRESSIONS:
        selectors = _selectors(expression)
        assert selectors, expression
        for name, chosen_by in selectors:
            assert name in labels, expression
            assert "run" in chosen_by, f"{expression}: runs would be mixed"
            assert chosen_by <= labels[name], expression
    asked = {name for expression in EXPRESSIONS for name, _ in _selectors(expression)}
    assert asked == set(labels), "every figure is shown"


def test_legends_and_variables_name_what_is_served(labels: dict[str, set[str]]) -> None:
    for panel in SHOWN:
        for target in panel["targets"]:
            (name, _), *_ = _selectors(target["expr"])
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) == labels[name], panel["title"]
    for text in re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)):
        assert text in VARIABLES or text.startswith("__"), text
    query = VARIABLES["run"]["query"]["query"]
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # pyright: ignore
    assert label in labels[name]


def test_a_name_or_label_that_is_not_served_would_be_found() -> None:
    assert _selectors('rate(megatron_glue_loss{run=~"$run", rank="0"}[5m]) / on(run) megatron_glue_lr') == [
        ("megatron_glue_loss", {"run", "rank"}),
        ("megatron_glue_lr", set()),
    ]


def test_panels_are_whole() -> None:
    assert DASHBOARD["schemaVersion"] == SCHEMA_VERSION
    assert VARIABLES["datasource"]["type"] == "datasource"
    identities = [panel["id"] for panel in PANELS]
    assert len(identities) == len(set(identities))
    for panel in SHOWN:
        title = panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], title
        assert panel["description"], title
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources), title
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)), title


def test_panels_lie_beside_each_other() -> None:
    places = [panel["gridPos"] for panel in PANELS]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        is_apart = any(
            one[axis] + one[size] <= other[axis] or other[axis] + other[size] <= one[axis]
            for axis, size in (("x", "w"), ("y", "h"))
        )
        assert is_apart, (one, other)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_prometheus_own_linter_reads_the_page(page: str) -> None:
    outcome = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    accepted = ("use base unit", "should not contain abbreviated units")
    complaints = [line for line in outcome.stderr.splitlines() if not any(reason in line for reason in accepted)]
    assert not complaints, "units as they stand in the logs are ours; all else is as Prometheus would have it"


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus here: apt-get install prometheus")
def test_a_real_prometheus_answers_every_panel(endpoint: PrometheusSink, tmp_path: Path) -> None:
    port = free_port()
    target = {"job_name": "megatron_glue", "static_configs": [{"targets": [f"127.0.0.1:{endpoint.port}"]}]}
    settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": [target]}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings))
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 60
        while not _answer(port, "megatron_glue_iteration"):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.2)
        for expression in EXPRESSIONS:
            asked = expression.replace("$run", re.escape(RUN).replace("\\", "\\\\"))
            series = _answer(port, asked)
            assert series, asked
            assert {each["metric"]["run"] for each in series} == {RUN}
    finally:
        process.terminate()
        process.wait(20)


def _answer(port: int, expression: str) -> list[dict[str, Any]]:
    """Series that an expression has now; none while the server starts."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=10) as answer:
            return json.loads(answer.read())["data"]["result"]
    except (urllib.error.URLError, ConnectionError):
        return []
