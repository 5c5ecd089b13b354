#!/usr/bin/env python3
"""Prove that layouts change nothing: each computes what one process computes.

Every layout of a list runs on processes of this machine (gloo, or one GPU per rank and NCCL with --device cuda), with
the three optimisations on and off, and is compared with one process without them:

- losses, clip norms, and the logged load-balancing and z-losses of three steps;
- every gradient of the first step, gathered whole;
- the routers' gradients from the load-balancing loss alone and from the z-loss alone;
- tokens per expert in the first step, which must be equal;
- every weight after three steps, and the routers' balancing biases.

Differences are relative norms, |a - b| / |b|; a row shows the largest one and what it was in. In fp32 at most 1e-5 is
allowed, in bf16 2e-2 (--tolerance for others). A row whose routers leave nothing to compare, no gradient or only zeros,
fails. Besides, weights at both ends of a run must be equal bit for bit between replicas, as must a tied embedding and
its gradient between the two stages that hold it, and every micro-batch between the ranks that share it. A row that
hangs or crashes is ended after --timeout-s and the rest go on. Exit code 1 if a row failed.

Layouts and models come from tools/parity_layouts.yaml, or from your own file (--layouts; docs/parity.md has the form,
examples/layouts/ one to start from). All flags of the entry points are accepted too and hold for every row.

    python tools/parity.py --quick
    python tools/parity.py --only tp pp --optimisations off
    python tools/parity.py --layouts examples/layouts/small_moe.yaml --seq-length 256 --json parity.json
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import resolve_config
from megatron_glue.config.sections import RunConfig
from megatron_glue.config.validation import validate
from megatron_glue.parallel import local_ranks
from megatron_glue.parallel.local_ranks import LocalGroup, RankFailedError, run_on_ranks
from megatron_glue.proofs.comparison import Comparison, compare
from megatron_glue.proofs.layouts import Layout, read_layouts
from megatron_glue.proofs.observation import observe_on_rank
from megatron_glue.proofs.sample_documents import write_sample_documents
from megatron_glue.training.exit_codes import exit_code_of
from megatron_glue.training.summary import check_writable_file, write_json

TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
DEFAULT_LAYOUTS = Path(__file__).with_name("parity_layouts.yaml")
SWITCH_FLAGS = {"on": ("--use-packed-cache", "--double-buffer-ckpt"), "off": ("--no-accelerator",)}
ONE_PROCESS = Layout("one process", 1)
NUM_DOCUMENTS = 200
SHOWN_FAILURES = 4


@dataclass(frozen=True)
class Row:
    """One layout of one model, with the three optimisations on or off.

    Attributes:
        layout: How the work is divided.
        model: Name of the model.
        flags: The model's flags.
        switches: ``on`` or ``off``.
    """

    layout: Layout
    model: str
    flags: tuple[str, ...]
    switches: str

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.layout.name} ({self.model}, {self.switches})"


@dataclass
class Result:
    """What became of a row.

    Attributes:
        row: The row.
        status: ``ok``, ``failed`` or ``skipped``.
        difference: Largest relative difference; infinite if nothing could be compared.
        where: What it was in.
        failures: Why it failed or was skipped, a line each.
        seconds: Wall time.
        cpu_seconds: CPU time of all ranks together.
    """

    row: Row
    status: str
    difference: float = math.inf
    where: str = ""
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "layout": self.row.layout.name,
            "model": self.row.model,
            "world_size": self.row.layout.world_size,
            "flags": list(self.row.layout.flags),
            "optimisations": self.row.switches,
            "status": self.status,
            "largest_difference": self.difference if math.isfinite(self.difference) else None,
            "largest_difference_in": self.where,
            "failures": self.failures,
            "seconds": round(self.seconds, 2),
            "cpu_seconds": round(self.cpu_seconds, 2),
        }


class Laboratory:
    """Runs rows on processes of this machine and keeps what one process observed.

    Args:
        arguments: This tool's own flags.
        shared_flags: Flags of every row, after the model's and the layout's.
        folder: Room for temporary files.
    """

    def __init__(self, arguments: argparse.Namespace, shared_flags: Sequence[str], folder: Path) -> None:
        self.tolerance: float = arguments.tolerance or TOLERANCES[arguments.precision]
        self._arguments = arguments
        self._shared_flags = tuple(shared_flags)
        self._folder = folder
        self._references: dict[str, dict[str, Any]] = {}
        self._num_runs = 0

    def run(self, row: Row) -> Result:
        """Run one row; whatever goes wrong in it stays in it."""
        start = time.monotonic()
        result = self._skipped(row)
        if result is None:
            try:
                reports = self._observe(row)
                result = self._judge(row, compare(reports, self._reference(row)))
                result.cpu_seconds = sum(report["cpu_seconds"] for report in reports)
            except (RankFailedError, ConfigError) as error:
                result = Result(row, "failed", failures=[_reason(error)])
        result.seconds = time.monotonic() - start
        return result

    def resolve(self, row: Row) -> RunConfig:
        """The configuration of a row.

        Raises:
            ConfigError: If it cannot run.
        """
        words = [*row.flags, *SWITCH_FLAGS[row.switches], *row.layout.flags, *self._shared_flags]
        config = resolve_config(words, {}, RunConfig(), "tools/parity.py").config
        validate(config, row.layout.world_size)
        return config

    def _skipped(self, row: Row) -> Result | None:
        """Why a row cannot run on this machine, if so."""
        needed, available = row.layout.world_size, torch.cuda.device_count()
        if row.layout.requires and importlib.util.find_spec(row.layout.requires) is None:
            return Result(row, "skipped", failures=[f"{row.layout.requires} is not installed"])
        if self._arguments.device == "cuda" and available < needed:
            return Result(row, "skipped", failures=[f"needs {needed} GPUs, {available} here"])
        return None

    def _observe(self, row: Row) -> list[dict[str, Any]]:
        config = self.resolve(row)
        self._num_runs += 1
        folder = self._folder / str(self._num_runs)
        group = LocalGroup(row.layout.world_size, self._arguments.timeout_s, device_type=self._arguments.device)
        return run_on_ranks(observe_on_rank, group, config, str(folder))

    def _reference(self, row: Row) -> dict[str, Any]:
        if row.model not in self._references:
            self._references[row.model] = self._observe(Row(ONE_PROCESS, row.model, row.flags, "off"))[0]
        return self._references[row.model]

    def _judge(self, row: Row, comparison: Comparison) -> Result:
        failures, largest = comparison.failures(self.tolerance), comparison.largest
        return Result(row, "failed" if failures else "ok", largest.value, largest.what, failures)


def _reason(error: Exception) -> str:
    """The last line of a rank's traceback, or an error's only line."""
    if isinstance(error, RankFailedError):
        lines = str(error).strip().splitlines()
        return lines[0] if len(lines) == 1 else f"rank {error.rank}: {lines[-1]}"
    return str(error)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Split this tool's own flags from those of the runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--layouts", metavar="F", default=str(DEFAULT_LAYOUTS), help="YAML file of models and layouts")
    parser.add_argument("--quick", action="store_true", help="only the layouts marked quick: about a minute on 2 cores")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="only layouts whose name contains one of these")
    parser.add_argument("--optimisations", choices=("both", "on", "off"), default="both", help="default: both")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--precision", choices=tuple(TOLERANCES), default="fp32", help="default: fp32")
    parser.add_argument("--tolerance", type=float, metavar="X", help="largest relative difference (default: see above)")
    parser.add_argument("--timeout-s", type=float, default=180.0, metavar="S", help="per row (default 180)")
    parser.add_argument("--json", metavar="F", help="write all results there")
    parser.add_argument("--list", action="store_true", help="show the layouts and their flags, run nothing")
    arguments, rest = parser.parse_known_args()
    for name in ("tolerance", "timeout_s"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')}", value, "not a positive number", "give a larger one")
    return arguments, rest


def choose_rows(arguments: argparse.Namespace) -> list[Row]:
    """The rows that were asked for.

    Raises:
        ConfigError: If the file is wrong or nothing is left.
    """
    layouts = read_layouts(arguments.layouts)
    rows = [
        Row(layout, model, layouts.models[model], switches)
        for layout in layouts.layouts
        if arguments.only is None or any(word in layout.name for word in arguments.only)
        for model in (layout.quick_models if arguments.quick else layout.models)
        for switches in ("off", "on")
        if layout.optimisations in ("both", switches) and arguments.optimisations in ("both", switches)
    ]
    if not rows:
        raise ConfigError("--only", " ".join(arguments.only or ()), "no layout is left", "see --list for their names")
    return rows


def print_table(results: Sequence[Result], title: str) -> None:
    """Show one line per row."""
    table = Table(title=title, title_justify="left")
    for column in ("layout", "model", "ranks", "optimisations", "largest difference", "in", "s", ""):
        justify = "right" if column in ("ranks", "largest difference", "s") else "left"
        table.add_column(column, justify=justify, no_wrap=column not in ("layout", "in"), overflow="fold")
    for result in results:
        row = result.row
        shown = f"{result.difference:.1e}" if result.where else "-"
        where = result.where or (result.failures[0] if result.failures else "")
        cells = (row.layout.name, row.model, str(row.layout.world_size), row.switches, shown, where)
        table.add_row(*cells, f"{result.seconds:.1f}", result.status)
    Console(width=140).print(table)


def run_all(laboratory: Laboratory, rows: Sequence[Row]) -> Iterator[Result]:
    """Run row after row and tell on standard error how far it is."""
    console = Console(stderr=True)
    for number, row in enumerate(rows, start=1):
        with console.status(f"{number}/{len(rows)} {row.name}"):
            result = laboratory.run(row)
        detail = f"{result.difference:.1e} in {result.where}" if result.where else "; ".join(result.failures[:1])
        line = f"{number}/{len(rows)} {row.name}: {result.status}, {detail}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
        yield result


def run() -> int:
    """Choose, run, show, write, judge."""
    arguments, rest = parse_arguments()
    rows = choose_rows(arguments)
    if arguments.list:
        for layout in dict.fromkeys(row.layout for row in rows):
            print(f"{layout.name}: {layout.world_size} ranks, {' '.join(layout.flags) or 'no flags'}")
        return 0
    if arguments.json:
        check_writable_file(arguments.json, "--json")
    start = time.monotonic()
    local_ranks.preload(["megatron_glue.proofs.observation"])
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_sample_documents(Path(folder) / "documents.jsonl", NUM_DOCUMENTS)
        shared = ["--data-path", str(corpus), "--device", arguments.device, "--precision", arguments.precision, *rest]
        laboratory = Laboratory(arguments, shared, Path(folder))
        # Nothing runs if the flags that hold for every row are wrong.
        laboratory.resolve(Row(ONE_PROCESS, rows[0].model, rows[0].flags, "off"))
        results = list(run_all(laboratory, rows))
    counts = {status: sum(result.status == status for result in results) for status in ("ok", "failed", "skipped")}
    title = (
        f"{len(results)} rows against one process, {arguments.precision} on {arguments.device}, "
        f"tolerance {laboratory.tolerance:.0e}, {time.monotonic() - start:.0f} s"
    )
    print_table(results, title)
    for result in results:
        for line in result.failures[:SHOWN_FAILURES]:
            print(f"{'FAILED' if result.status == 'failed' else 'skipped'} {result.row.name}: {line}")
        if more := result.failures[SHOWN_FAILURES:]:
            print(f"FAILED {result.row.name}: and {len(more)} more, all of them in --json")
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if arguments.json:
        facts = {"tolerance": laboratory.tolerance, "device": arguments.device, "precision": arguments.precision}
        write_json(arguments.json, facts | {"counts": counts, "rows": [result.as_json() for result in results]})
    return 1 if counts["failed"] else 0


def main() -> int:
    """Entry point with one-line errors."""
    return exit_code_of(run)


if __name__ == "__main__":
    raise SystemExit(main())
