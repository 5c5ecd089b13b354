"""A comparison names what drifted and what changed between the two."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import pytest
from rich.console import Console

from megatron_glue.config.errors import ConfigError
from megatron_glue.proofs.baseline_comparison import check_comparable, compare, gate_table, records_table
from megatron_glue.proofs.gate import Thresholds
from tests.support.baseline_records import RECORD


def changed(**observed: Any) -> Any:
    """The record of a later version."""
    return dataclasses.replace(
        RECORD,
        name="0.2.0-def",
        observed={**RECORD.observed, **observed},
        environment={"software": {"torch": "3", "Python": "3.12.1"}, "config": {"backend": {"attention": "te"}}},
        packages={"torch": "torch==3", "new": "new==1"},
    )


def shown(table: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(table)
    return out.getvalue()


def test_equal_numbers_pass_and_changes_are_named() -> None:
    comparison = compare(RECORD, changed(), Thresholds(), "auto")
    assert comparison.num_failed == 0
    assert comparison.versions == ["torch 2 -> 3"]
    assert comparison.packages == ["new absent -> 1", "torch 2 -> 3"]
    assert comparison.settings == ["attention absent -> te"]
    lines = list(comparison.changes())
    assert "packages: torch 2 -> 3, 1 new" in lines
    same = compare(RECORD, RECORD, Thresholds(), "auto")
    assert next(iter(same.changes())) == "versions: none changed"


def test_drift_fails_and_is_written_as_json() -> None:
    now = changed(losses=[5.0], heldout=[4.1], tokens_per_second=1.0)
    comparison = compare(RECORD, now, Thresholds(), "report")
    failed = [figure.name for figure in comparison.figures if figure.is_failed]
    assert failed == ["training loss", "held-out loss"]
    record = json.loads(json.dumps(comparison.as_record(), allow_nan=False))
    assert record["passed"] is False
    by_name = {figure["name"]: figure for figure in record["figures"]}
    assert by_name["training loss"]["difference"] is None, "infinite: the lengths differ"
    assert by_name["tokens/s"]["allowed"] is None
    text = shown(gate_table(comparison.figures, ""))
    assert text.count("FAILED") == 2
    assert text.count("reported") == 2


def test_another_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="ranks=2: the baseline was made with ranks=1"):
        check_comparable({"steps": 2, "ranks": 2}, RECORD, "--against")
    check_comparable({"steps": 2, "ranks": 1}, RECORD, "--against")


def test_the_table_of_records_has_their_figures() -> None:
    text = shown(records_table([RECORD], "archive"))
    for cell in ("0.1.0-abc", "2026-01-02 00:00:00", "0.33333", "4.00000", "1 MiB"):
        assert cell in text
