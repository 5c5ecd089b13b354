"""A report is held to its budget layer by layer, and a budget that is none is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.proofs.host_read import HostRead
from megatron_glue.proofs.sync_budget import SyncBudget, read_budget

BUDGET = """
limits: {layer: 0, exchange: 1, step: 2}
exchange_functions: [Dispatcher.plan]
exceptions:
  - {name: kernel, file: ops/kernel.py, functions: [run], devices: [cpu], reason: the kernel of a CPU}
"""


@pytest.fixture
def budget(tmp_path: Path) -> SyncBudget:
    (tmp_path / "budget.yaml").write_text(BUDGET)
    return read_budget(tmp_path / "budget.yaml")


def read(layer: int, count: int = 1, file: str = "a.py", function: str = "f") -> dict[str, Any]:
    return HostRead(file, 7, function, "item", "forward", layer).as_dict() | {"count": count}


def report(*reads: dict[str, Any], **facts: Any) -> dict[str, Any]:
    common = {"rank": 0, "device": "cpu", "num_micro_batches": 2, "moe_layers": [1], "has_exchange": True}
    return common | {"reads": list(reads)} | facts


def test_a_read_in_a_layer_is_one_too_many(budget: SyncBudget) -> None:
    (line,) = budget.overruns(report(read(0)))
    assert line == "layer 0, 2 micro-batches: 1 host reads, 0 allowed: a.py:7 item x1 (forward)"


def test_an_exchange_may_read_once_per_micro_batch(budget: SyncBudget) -> None:
    plan = {"function": "Dispatcher.plan"}
    assert budget.overruns(report(read(1, 2, **plan))) == []
    assert "3 reads for the exchange, 2 allowed" in budget.overruns(report(read(1, 3, **plan)))[0]
    assert budget.overruns(report(read(0, 1, **plan))), "the layer has no experts"
    assert budget.overruns(report(read(1, 2, **plan), has_exchange=False)), "nobody shares experts"
    assert budget.overruns(report(read(1, 1))), "read somewhere else"


def test_what_is_outside_of_layers_is_counted_by_step(budget: SyncBudget) -> None:
    assert budget.overruns(report(read(-1, 1), read(-1, 1, function="g"))) == []
    (line,) = budget.overruns(report(read(-1, 2), read(-1, 1, function="g")))
    assert line.startswith("outside of layers: 3 host reads, 2 allowed")


def test_an_exception_is_of_a_file_a_function_and_a_device(budget: SyncBudget) -> None:
    excepted = read(0, 9, file="ops/kernel.py", function="run")
    assert budget.overruns(report(excepted)) == []
    assert budget.classify(excepted, report()) == "kernel"
    assert budget.overruns(report(excepted, device="cuda"))
    assert budget.overruns(report(read(0, file="ops/kernel.py", function="stop")))
    assert budget.overruns(report(read(0, file="ops/other.py", function="run")))


def test_limits_are_none_unless_given(tmp_path: Path) -> None:
    (tmp_path / "budget.yaml").write_text("limits: {}")
    budget = read_budget(tmp_path / "budget.yaml")
    assert (budget.layer, budget.exchange, budget.step, budget.exceptions) == (0, 0, 0, ())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("limits: [", "budget.yaml:1"),
        ("[]", "the document"),
        ("exceptions: []", "limits"),
        ("limits: {layers: 0}", "did you mean layer?"),
        ("limits: {layer: -1}", "limits.layer"),
        ("limits: {layer: true}", "limits.layer"),
        ("limits: {}\nexceptions: text", "exceptions"),
        ("limits: {}\nexchange_functions: f", "exchange_functions"),
        ("limits: {}\nexceptions: [{name: a, file: b, functions: [c]}]", "exceptions[0].reason"),
        ("limits: {}\nexceptions: [{name: a, file: b, functions: [], reason: d}]", "exceptions[0].functions"),
        ("limits: {}\nexceptions: [{name: a, file: b, functions: [c], devices: [tpu], reason: d}]", "devices"),
    ],
)
def test_a_budget_that_is_none(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "budget.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_budget(tmp_path / "budget.yaml")
    assert named in str(error.value)


def test_a_budget_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--budget=.*none.yaml: cannot be read"):
        read_budget(tmp_path / "none.yaml")
