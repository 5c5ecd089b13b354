"""The page holds what is known of a run, escapes what it was given, and lets no script but its own run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_glue.proofs.run_folder import read_run
from tests.support.run_folders import summary_of, write_saved_step
from tools.report import build_page, main

ATTACK = '</script><script>document.title="x"</script><img src=x onerror=alert(1)>'


class Elements(HTMLParser):
    """Tags with their attributes, and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        (self.scripts if self.found and self.found[-1][0] == "script" else self.texts).append(data)


def page_of(folder: Path) -> str:
    return build_page(read_run(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_saved_step(tmp_path, 3, [5.0, 4.0, 3.0])
    (tmp_path / "summary.json").write_text(json.dumps(summary_of([5.0, 4.0, 3.0])))
    techniques = [{"name": "packed-metadata cache", "on": True, "reason": "built once", "source": "command line"}]
    start = {"cpu": {"cores": 2}, "git_revision": "abc123", "optimisations": techniques}
    (tmp_path / "env.json").write_text(json.dumps(start))
    lines = (
        {"iteration": n, "memory.allocated_bytes": n * 2**20, "heldout_loss": 3.0, "z_loss": 0.4, "alarms": ["hot"]}
        for n in (1, 2, 3)
    )
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def test_the_page_holds_everything(folder: Path) -> None:
    page = page_of(folder)
    text = " ".join(Elements(page).texts)
    for expected in (
        *("Loss", "Learning rate", "Gradient norm", "Throughput", "Memory", "held out", "z_loss"),
        *("cpu.cores", "abc123", "megatron_glue", "9.8.7", "--num-layers", "2 ranks: dp 2", "1 without any token"),
        *("packed-metadata cache", "predicting by frequency", "1.0 builds", "All ", "built once", "iteration 2: hot"),
    ):
        assert expected in text, expected
    assert page.count("data-chart=") == 7
    assert page.count('class="cell') == 8


def test_it_loads_nothing_and_runs_one_script(folder: Path) -> None:
    elements = Elements(page_of(folder))
    for tag, attributes in elements.found:
        assert tag not in ("link", "iframe", "img", "object")
        assert not {"src", "onclick", "onerror"} & attributes.keys()
        assert attributes.get("href", "#").startswith("#")
    (policy,) = (a["content"] for t, a in elements.found if t == "meta" and a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    digest = base64.b64encode(hashlib.sha256(elements.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "url(" not in page_of(folder)


def test_what_a_run_says_is_text(tmp_path: Path) -> None:
    write_saved_step(tmp_path, 1, [5.0], layout=ATTACK, provenance={"num_layers": ATTACK})
    (tmp_path / "summary.json").write_text(json.dumps(summary_of([5.0], name=ATTACK, checkpoint=ATTACK)))
    (tmp_path / "env.json").write_text(json.dumps({ATTACK: ATTACK}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"iteration": 1, ATTACK: 1.0}))
    elements = Elements(page_of(tmp_path))
    assert not any(tag == "img" for tag, _ in elements.found)
    assert sum(tag == "script" for tag, _ in elements.found) == 2
    assert json.loads(elements.scripts[0])


def test_a_loss_that_is_not_a_number_is_a_gap(tmp_path: Path) -> None:
    write_saved_step(tmp_path, 3, [5.0, float("nan"), 4.0])
    elements = Elements(page_of(tmp_path))
    points = json.loads(elements.scripts[0], parse_constant=pytest.fail)
    assert [point[0] for point in points[0]["lines"][0]["points"]] == [1, 3]


def test_sections_without_content_say_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "loss": 2.0}')
    text = " ".join(Elements(page_of(tmp_path)).texts)
    for expected in (
        "No loads of experts",
        "Neither a configuration nor a summary",
        "None.",
        "Nothing is known of it",
    ):
        assert expected in text


def test_a_summary_of_another_version_costs_its_rows_only(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"losses": [1.0], "iterations": 1}')
    assert "Loss" in page_of(tmp_path)


def test_the_command_writes_beside_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tools/report.py", str(folder)])
    assert main() == 0
    assert capsys.readouterr().out == f"wrote {folder / 'report.html'}\n"
    assert re.match(r"<!doctype html>", (folder / "report.html").read_text())


def test_wrong_use_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tools/report.py", str(tmp_path)])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: RUN={tmp_path}: holds no checkpoint")
