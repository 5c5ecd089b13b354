"""What a user reads where matplotlib is missing, and the form of tables."""

from __future__ import annotations

import sys

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.proofs.pictures import load_pyplot, markdown_table


def test_a_missing_matplotlib_is_one_line_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError) as caught:
        load_pyplot("--out", "here")
    expected = "--out=here: draws with matplotlib, which is not installed; run pip install -e '.[bench]'"
    assert str(caught.value) == expected


def test_markdown_table() -> None:
    assert markdown_table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"
