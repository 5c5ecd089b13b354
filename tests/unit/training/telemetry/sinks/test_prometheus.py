from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.training.telemetry.record import MetricRecord
from megatron_glue.training.telemetry.sinks.prometheus import PrometheusSink

RECORD = MetricRecord(
    7, 1.0, {"loss": 2.5, "grad_norm": float("nan"), "saves_total": 3}, {"expert_load_max": {1: 1.5, 3: float("inf")}}
)


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    sink = PrometheusSink("127.0.0.1", 0, 'a "run"')
    yield sink
    sink.close()


def get(sink: PrometheusSink, path: str = "/metrics") -> tuple[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}{path}", timeout=10) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def test_a_scrape_gets_the_newest_record(sink: PrometheusSink) -> None:
    assert get(sink)[0] == ""
    sink.write(RECORD)
    page, content_type = get(sink)
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    lines = page.splitlines()
    assert r'megatron_glue_iteration{run="a \"run\""} 7' in lines
    assert r'megatron_glue_loss{run="a \"run\""} 2.5' in lines
    assert r'megatron_glue_grad_norm{run="a \"run\""} NaN' in lines
    assert r'megatron_glue_expert_load_max{run="a \"run\"",layer="1"} 1.5' in lines
    assert r'megatron_glue_expert_load_max{run="a \"run\"",layer="3"} +Inf' in lines
    assert "# TYPE megatron_glue_saves_total counter" in lines
    assert "# TYPE megatron_glue_loss gauge" in lines


def test_figures_that_a_record_lacks_stay(sink: PrometheusSink) -> None:
    sink.write(RECORD)
    sink.write(MetricRecord(8, 2.0, {"loss": 2.0}))
    page, _ = get(sink, "/metrics?x=1")
    assert " 2.0\n" in page
    assert "saves_total" in page


def test_the_page_is_what_prometheus_own_parser_takes(sink: PrometheusSink) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="pip install '.[test]'")
    sink.write(RECORD)
    samples = {
        (sample.name, sample.labels.get("layer")): sample.value
        for family in parser.text_string_to_metric_families(get(sink)[0])
        for sample in family.samples
        if sample.labels["run"] == 'a "run"'
    }
    assert samples["megatron_glue_loss", None] == 2.5
    assert samples["megatron_glue_saves_total", None] == 3
    assert samples["megatron_glue_expert_load_max", "1"] == 1.5


def test_other_paths_are_not_found(sink: PrometheusSink) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(sink, "/")


def test_a_port_in_use_is_a_plain_error(sink: PrometheusSink) -> None:
    with pytest.raises(ConfigError, match=r"--metrics-port.*in use.*give a free port"):
        PrometheusSink("127.0.0.1", sink.port, "other")


def test_it_listens_on_loopback_alone(sink: PrometheusSink) -> None:
    assert sink._server.server_address[0] == "127.0.0.1"
