"""The report of a real run in a real browser: it draws, in a light and in a dark one, and its console stays empty.

The browser is Debian's chromium without a window. With ``--enable-logging=stderr --v=0`` it writes a line with
``CONSOLE`` to standard error for each message of a page's console: errors of scripts, refused resources and what the
content policy blocks. A broken page shows that such a line would be seen.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.cases import write_corpus
from tests.support.commands import succeed

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium (apt-get install chromium)"),
]
LIGHT, DARK = "1", "0"
TIMEOUT_S = 60


def look(page: Path, scratch: Path, *flags: str) -> tuple[str, list[str]]:
    """Open a page; returns the browser's standard output and the messages of the page's console."""
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,2400"]
    # In a container of root there is no sandbox; the page is our own.
    command += ["--no-sandbox"] if os.geteuid() == 0 else []
    command += ["--enable-logging=stderr", "--v=0", f"--user-data-dir={scratch}", *flags, page.as_uri()]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout, [line for line in outcome.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_corpus(folder / "corpus.jsonl")
    flags = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--moe-ffn-hidden-size", "16"]
    flags += ["--data-path", "corpus.jsonl", "--seq-length", "64", "--heldout-fraction", "0.2", "--device", "cpu"]
    flags += ["--train-iters", "6", "--eval-iters", "1", "--sample-tokens", "0", "--save", "run"]
    succeed(["pretrain_moe.py", *flags, "--use-packed-cache", "--double-buffer-ckpt"], folder)
    succeed(["tools/report.py", "run"], folder)
    return folder / "run/report.html"


def test_a_run_has_its_course_experts_and_checkpoints_on_one_page(report: Path) -> None:
    page = report.read_text()
    for title in ("Loss", "Learning rate", "Throughput", "Reloads of activations"):
        assert f'aria-label="{title}"' in page
    assert page.count('class="cell') == 2 * 8
    assert "1 ranks: dp 1" in page


class TestInABrowser:
    pytestmark = browser

    def test_the_script_comes_to_its_end_without_an_error(self, report: Path, tmp_path: Path) -> None:
        dom, console = look(report, tmp_path, "--dump-dom", f"--blink-settings=preferredColorScheme={LIGHT}")
        assert console == []
        root = re.search(r"<html[^>]*>", dom)
        assert root is not None
        num_charts = report.read_text().count("data-chart=")
        assert f'data-ready="{num_charts}"' in root.group()
        assert 'data-errors="0"' in root.group()
        assert 'data-theme="light"' in root.group()

    def test_screenshots_are_drawn_light_and_dark(self, report: Path, tmp_path: Path) -> None:
        image = pytest.importorskip("matplotlib.image")
        shades = {}
        for name, scheme in (("light", LIGHT), ("dark", DARK)):
            picture = tmp_path / f"{name}.png"
            flags = (f"--screenshot={picture}", f"--blink-settings=preferredColorScheme={scheme}")
            _, console = look(report, tmp_path / name, *flags)
            assert console == []
            pixels = image.imread(picture)[..., :3]
            assert pixels.shape[:2] == (2400, 1280)
            shades[name] = float(pixels.mean())
            blue = (pixels[..., 2] - pixels[..., 0]) > 0.3
            assert blue.sum() > 500, "the lines of the charts"
        assert shades["light"] > 0.85
        assert shades["dark"] < 0.25

    def test_an_error_on_a_page_would_be_seen(self, report: Path, tmp_path: Path) -> None:
        broken = tmp_path / "broken.html"
        broken.write_text(report.read_text().replace('id="points">', 'id="points">{', 1))
        _, console = look(broken, tmp_path / "profile", "--dump-dom")
        assert any("SyntaxError" in line for line in console)

    def test_the_policy_blocks_what_is_not_the_pages_own(self, report: Path, tmp_path: Path) -> None:
        foreign = tmp_path / "foreign.html"
        script = '<script>document.documentElement.dataset.foreign = "ran"</script></main>'
        foreign.write_text(report.read_text().replace("</main>", script, 1))
        dom, console = look(foreign, tmp_path / "profile", "--dump-dom")
        assert 'data-foreign="ran"' not in dom
        assert any("Content Security Policy" in line for line in console)
