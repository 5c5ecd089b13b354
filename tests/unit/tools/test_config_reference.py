"""The reference of the configuration is generated, and current."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_glue.config.fields import field_specs
from megatron_glue.config.loading import from_dict
from tools import config_reference
from tools.config_reference import BEGIN, END, PAGE, current, main


def test_the_page_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert current(page) == page, "run python tools/config_reference.py"


def test_every_field_has_a_row() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"| `{name}` | `{spec.flag}" in page for name, spec in field_specs().items())


def test_the_example_in_the_page_loads() -> None:
    block = PAGE.read_text(encoding="utf-8").split("```yaml")[1].split("```")[0]
    assert from_dict(yaml.safe_load(block)).accelerator.enable_double_buffer


def test_check_fails_on_a_stale_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Words\n{BEGIN}\nold\n{END}\nmore words\n")
    monkeypatch.setattr(config_reference, "PAGE", page)
    assert main(["--check"]) == 1
    assert "old" in page.read_text()
    assert main([]) == 0
    assert main(["--check"]) == 0
    assert page.read_text().startswith("# Words\n")
    assert page.read_text().endswith("more words\n")


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks"):
        current("# Words\n")
