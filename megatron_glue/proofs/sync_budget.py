"""How many host reads a training step may have: reads a budget from YAML and holds a report against it.

    limits:
      layer: 0          # per layer and micro-batch
      exchange: 1       # besides, per MoE layer whose experts ranks share, and micro-batch; only in exchange_functions
      step: 0           # outside of layers, per step
    exchange_functions: [_AllToAllPlan.finish]
    exceptions:
      - name: grouping in NumPy
        file: megatron_glue/ops/grouping.py
        functions: [_order_by_numpy]
        devices: [cpu]              # default: all
        reason: the kernel of a machine without a device

Reports come from ``sync_audit.py``. Nothing here runs a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import nearest

FLAG = "--budget"
DEVICES = ("cpu", "cuda")
WITHIN, EXCHANGE, OVER = "within", "exchange", "OVER"


@dataclass(frozen=True)
class ReadException:
    """Reads that are wanted, and why.

    Attributes:
        name: For people.
        file: Where they are, from the repository on.
        functions: Qualified names of the functions that read.
        devices: Types of devices on which the exception holds.
        reason: Why.
    """

    name: str
    file: str
    functions: tuple[str, ...]
    devices: tuple[str, ...]
    reason: str

    def covers(self, read: Mapping[str, Any], device: str) -> bool:
        """Whether a read of a report is one of them."""
        return device in self.devices and read["file"] == self.file and read["function"] in self.functions


@dataclass(frozen=True)
class SyncBudget:
    """A file of limits.

    Attributes:
        layer: Reads per layer and micro-batch.
        exchange: Reads per micro-batch and MoE layer whose experts ranks share, in ``exchange_functions``.
        step: Reads outside of layers per step.
        exchange_functions: Qualified names of the functions that read what an exchange needs on the host.
        exceptions: Reads that count for nothing.
    """

    layer: int
    exchange: int
    step: int
    exchange_functions: tuple[str, ...]
    exceptions: tuple[ReadException, ...]

    def classify(self, read: Mapping[str, Any], report: Mapping[str, Any]) -> str:
        """Say what a read counts as.

        Args:
            read: One entry of ``report["reads"]``.
            report: See :func:`~megatron_glue.proofs.sync_audit.audit_step`.

        Returns:
            The name of an exception, ``exchange``, or an empty text for a read that is neither.
        """
        for exception in self.exceptions:
            if exception.covers(read, report["device"]):
                return exception.name
        is_exchange = report["has_exchange"] and read["layer"] in report["moe_layers"]
        return EXCHANGE if is_exchange and read["function"] in self.exchange_functions else ""

    def excess(self, report: Mapping[str, Any]) -> dict[tuple[int, str], tuple[int, int]]:
        """Find the layers that read too often.

        Args:
            report: One rank's.

        Returns:
            (layer, -1 for what is outside of layers; ``exchange`` or an empty text) -> (reads, reads allowed).
        """
        totals: Counter[tuple[int, str]] = Counter()
        for read in report["reads"]:
            label = self.classify(read, report)
            if label in ("", EXCHANGE):
                totals[read["layer"], label] += read["count"]
        found = {}
        for (layer, label), total in sorted(totals.items()):
            limit = self.exchange if label == EXCHANGE else self.layer
            allowed = self.step if layer < 0 else limit * report["num_micro_batches"]
            if total > allowed:
                found[layer, label] = total, allowed
        return found

    def overruns(self, report: Mapping[str, Any]) -> list[str]:
        """Say what is above the budget.

        Args:
            report: One rank's.

        Returns:
            A line for each layer, or the step, that reads too often; it names the places.
        """
        lines = []
        for (layer, label), (total, allowed) in self.excess(report).items():
            places = [
                f"{read['file']}:{read['line']} {read['kind']} x{read['count']} ({read['phase']})"
                for read in report["reads"]
                if (read["layer"], self.classify(read, report)) == (layer, label)
            ]
            where = "outside of layers" if layer < 0 else f"layer {layer}, {report['num_micro_batches']} micro-batches"
            what = "reads for the exchange" if label == EXCHANGE else "host reads"
            lines.append(f"{where}: {total} {what}, {allowed} allowed: {'; '.join(places)}")
        return lines


def read_budget(path: str | Path) -> SyncBudget:
    """Read a file.

    Args:
        path: The file as the user wrote it.

    Returns:
        Its budget.

    Raises:
        ConfigError: When it cannot be read, is no YAML, or is not of the form above.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(FLAG, path, f"cannot be read: {reason}", "give the path of a YAML file") from error
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "not a YAML document"
        place = f"{path}:{mark.line + 1 if mark else 1}"
        raise ConfigError(place, "", f"not YAML: {problem}", "correct the line") from error
    return _Reader(str(path)).read(data)


class _Reader:
    """Checks what YAML made of a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def read(self, data: Any) -> SyncBudget:
        root = self._mapping(data, "the document", ("limits", "exchange_functions", "exceptions"))
        limits = self._mapping(root.get("limits"), "limits", ("layer", "exchange", "step"))
        numbers = {name: self._count(limits.get(name, 0), f"limits.{name}") for name in ("layer", "exchange", "step")}
        entries = root.get("exceptions") or []
        if not isinstance(entries, list):
            raise self._error("exceptions", entries, "not a list", "start each exception with a dash")
        return SyncBudget(
            **numbers,
            exchange_functions=self._words(root.get("exchange_functions", []), "exchange_functions"),
            exceptions=tuple(self._exception(entry, f"exceptions[{index}]") for index, entry in enumerate(entries)),
        )

    def _exception(self, entry: Any, where: str) -> ReadException:
        values = self._mapping(entry, where, ("name", "file", "functions", "devices", "reason"))
        for name in ("name", "file", "reason"):
            if not isinstance(values.get(name), str) or not values[name].strip():
                raise self._error(f"{where}.{name}", values.get(name), "not a text", "every exception needs one")
        functions = self._words(values.get("functions"), f"{where}.functions")
        devices = self._words(values.get("devices", list(DEVICES)), f"{where}.devices")
        if not functions or not devices or not set(devices) <= set(DEVICES):
            wrong, value = ("functions", functions) if not functions else ("devices", devices)
            remedy = "name the functions that read" if not functions else f"use {', '.join(DEVICES)}"
            raise self._error(f"{where}.{wrong}", list(value), "nothing that can be excepted", remedy)
        return ReadException(values["name"], values["file"], functions, devices, values["reason"].strip())

    def _count(self, value: Any, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._error(where, value, "not a number of reads", "give 0 or more")
        return value

    def _words(self, value: Any, where: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self._error(where, value, "not a list of names", "write [one, another]")
        return tuple(value)

    def _mapping(self, value: Any, where: str, keys: Iterable[str]) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self._error(where, value, "not a mapping of names to values", "see docs/performance.md for the form")
        unknown = [str(key) for key in value if key not in keys]
        if unknown:
            suggestion = nearest(unknown[0], list(keys))
            remedy = f"did you mean {suggestion}?" if suggestion else f"use {', '.join(keys)}"
            raise self._error(f"{where}.{unknown[0]}", value[unknown[0]], "unknown key", remedy)
        return value

    def _error(self, where: str, value: Any, reason: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self._path}: {where}", value, reason, remedy)
