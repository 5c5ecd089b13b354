#!/usr/bin/env python3
"""List every host read of a device value in a training step, with its source line, and hold the list to a budget.

A read makes the host wait until the device has done all that was queued before. One step of the entry points' own code
is watched, after one that is not: batches, forward, recompute, backward, clipping, update and a logging step's numbers.
On CUDA torch's sync debug mode finds the reads. On a CPU a dispatch mode follows which tensors a GPU run would hold on
the device, and finds each operator and method that would read one, announced through HostReader or not.

Without flags a small mixture-of-experts model and a small dense one are audited, with the three optimisations on. All
flags of the entry points are accepted too (--config FILE.yaml, --no-accelerator, --moe-grouping loop, ...). Layouts of
several ranks run on processes of this machine; under torchrun the audit runs on its ranks.

The budget is tools/sync_budget.yaml: no read in a layer, one per MoE layer and micro-batch whose experts are shared by
ranks, and exceptions with their reasons. Exit code 1 above the budget.

    python tools/sync_audit.py
    python tools/sync_audit.py --model moe --expert-model-parallel-size 2
    python tools/sync_audit.py --model moe --config examples/glue_bound.yaml --json reads.json
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_glue.config.environment import RankEnvironment, read_environment
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.layout_rules import world_problems
from megatron_glue.config.loading import resolve_config
from megatron_glue.config.sections import RunConfig
from megatron_glue.config.validation import validate
from megatron_glue.parallel import local_ranks
from megatron_glue.parallel.launch import choose_device, distributed_session
from megatron_glue.parallel.local_ranks import LocalGroup, RankFailedError, run_on_ranks
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.proofs.observation import ObservedPlace
from megatron_glue.proofs.sample_documents import write_sample_documents
from megatron_glue.proofs.sync_audit import audit_on_rank, audit_step
from megatron_glue.proofs.sync_budget import OVER, WITHIN, SyncBudget, read_budget
from megatron_glue.training.exit_codes import exit_code_of
from megatron_glue.training.presets import GPT_DEFAULTS, MOE_DEFAULTS
from megatron_glue.training.summary import check_writable_file, write_json

DEFAULT_BUDGET = Path(__file__).with_name("sync_budget.yaml")
PRESETS = {"moe": MOE_DEFAULTS, "dense": GPT_DEFAULTS}
NUM_DOCUMENTS = 200
MAX_RANKS = 64


@dataclass(frozen=True)
class Audit:
    """What was found in one model.

    Attributes:
        name: Of the model.
        world_size: Its ranks.
        reports: Those of the ranks that this process knows of.
    """

    name: str
    world_size: int
    reports: Sequence[dict[str, Any]]


def small(preset: RunConfig, corpus: Path) -> RunConfig:
    """A preset of few and narrow layers, on a few documents, with the three optimisations on."""
    accelerator = preset.accelerator.model_copy(
        update={"enable_metadata_cache": True, "enable_double_buffer": True, "enable_grouped_index": True}
    )
    updates: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
        "data": {"data_path": (str(corpus),), "seq_length": 128, "heldout_fraction": 0.2, "packing_window": 16},
        "training": {"global_batch_size": 4, "accelerator": accelerator},
        "moe": {"moe_ffn_hidden_size": 32} if preset.moe.num_experts else {},
    }
    sections = {name: getattr(preset, name).model_copy(update=values) for name, values in updates.items()}
    return preset.model_copy(update=sections)


def smallest_world(config: RunConfig) -> int:
    """The fewest ranks that a layout can have.

    Raises:
        ConfigError: If no number fits.
    """
    unit = config.parallel.ranks_per_replica
    problem: ConfigError | None = None
    for world_size in range(unit, max(unit, MAX_RANKS) + 1, unit):
        problem = next(world_problems(config.parallel, world_size), None)
        if problem is None:
            return world_size
    assert problem is not None, "there is at least one number of ranks to try"
    raise problem


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Split this tool's own flags from those of the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--model", choices=("both", *PRESETS), default="both", help="entry point whose defaults the flags change"
    )
    parser.add_argument("--budget", metavar="F", default=str(DEFAULT_BUDGET), help="YAML file (tools/sync_budget.yaml)")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="processes to start (default: fewest that the layout has)"
    )
    parser.add_argument("--timeout-s", type=float, default=180.0, metavar="S", help="per model (default 180)")
    parser.add_argument("--json", metavar="F", help="write all reads there")
    arguments, rest = parser.parse_known_args()
    for name, value in (("--ranks", arguments.ranks), ("--timeout-s", arguments.timeout_s)):
        if value is not None and not value > 0:
            raise ConfigError(name, value, "not a positive number", "give a larger one")
    return arguments, rest


def choose_models(arguments: argparse.Namespace, words: Sequence[str], corpus: Path) -> dict[str, RunConfig]:
    """The configurations to audit by name: two presets that the flags make alike are one model."""
    chosen: dict[str, RunConfig] = {}
    for name in PRESETS if arguments.model == "both" else (arguments.model,):
        defaults = small(PRESETS[name], corpus)
        config = resolve_config(words, read_environment(), defaults, "tools/sync_audit.py").config
        chosen.setdefault("moe" if config.moe.num_experts else "dense", config)
    return chosen


def run_audits(
    models: dict[str, RunConfig], environment: RankEnvironment, arguments: argparse.Namespace, folder: Path
) -> Iterator[Audit]:
    """Audit model after model: here, on ranks that are started for it, or on those that torchrun started."""
    for name, config in models.items():
        world_size = environment.world_size
        if not environment.launcher:
            world_size = arguments.ranks or smallest_world(config)
        is_started_here = world_size > 1 and not environment.launcher
        # Where this process computes, or the last of those that it starts.
        place = (
            RankEnvironment(world_size - 1, world_size - 1, world_size, world_size) if is_started_here else environment
        )
        device = choose_device(config.training.device, place)
        validate(config, world_size, device.type)
        if is_started_here:
            group = LocalGroup(world_size, arguments.timeout_s, device_type=device.type)
            reports = run_on_ranks(audit_on_rank, group, config, str(folder / name))
        else:
            timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
            with distributed_session(environment, timeout, device):
                mesh = ParallelMesh.build(config.parallel, device.type, config.model.num_kv_heads)
                reports = [audit_step(config, ObservedPlace(mesh, device, folder / name / f"rank_{mesh.rank}"))]
        yield Audit(name, world_size, reports)


def spans(layers: Iterable[int]) -> str:
    """Layer numbers as people write them: 0-3, 7; a dash for what is outside of layers."""
    ordered = sorted(layers)
    starts = [layer for layer in ordered if layer - 1 not in ordered or layer == 0]
    ends = [layer for layer in ordered if layer + 1 not in ordered or layer < 0]
    pairs = zip(starts, ends, strict=True)
    return ", ".join("-" if end < 0 else f"{start}" if start == end else f"{start}-{end}" for start, end in pairs)


def print_reads(audit: Audit, budget: SyncBudget) -> None:
    """Show one line per place and phase, over all layers and ranks."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for report in audit.reports:
        excess = budget.excess(report)
        for read in report["reads"]:
            label = budget.classify(read, report)
            label = OVER if (read["layer"], label) in excess else label or WITHIN
            announced = "yes" if read["announced"] else "no"
            key = (f"{read['file']}:{read['line']}", read["function"], read["kind"], read["phase"], announced, label)
            row = rows.setdefault(key, {"layers": set(), "count": 0})
            row["count"] += read["count"]
            row["layers"].add(read["layer"])
    first = audit.reports[0]
    title = f"{audit.name}, {audit.world_size} rank(s), {first['device']}, {first['num_micro_batches']} micro-batches"
    table = Table(title=title, title_justify="left")
    for column in ("line", "function", "kind", "phase", "announced", "layers", "reads", "counts as"):
        table.add_column(column, justify="right" if column == "reads" else "left", overflow="fold")
    for (place, function, kind, phase, announced, label), row in sorted(rows.items()):
        table.add_row(place, function, kind, phase, announced, spans(row["layers"]), str(row["count"]), label)
    console = Console(width=160)
    console.print(table) if rows else console.print(f"{title}: no host read", highlight=False)


def run() -> int:
    """Choose, audit, show, judge, write."""
    arguments, words = parse_arguments()
    budget = read_budget(arguments.budget)
    environment = RankEnvironment.from_mapping(read_environment())
    if arguments.json:
        check_writable_file(arguments.json, "--json")
    local_ranks.preload(["megatron_glue.proofs.sync_audit"])
    results, overruns = [], []
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_sample_documents(Path(folder) / "documents.jsonl", NUM_DOCUMENTS)
        models = choose_models(arguments, words, corpus)
        for audit in run_audits(models, environment, arguments, Path(folder)):
            found = [f"{audit.name}, rank {r['rank']}: {line}" for r in audit.reports for line in budget.overruns(r)]
            overruns += found
            if environment.is_main:
                print_reads(audit, budget)
            results.append({"model": audit.name, "world_size": audit.world_size, "ranks": list(audit.reports)})
    for line in overruns:
        print(f"FAILED {line}")
    if environment.is_main:
        print("above the budget" if overruns else "within the budget")
        if arguments.json:
            content = {"budget": arguments.budget, "overruns": overruns, "models": results}
            write_json(arguments.json, content)
    return 1 if overruns else 0


def main() -> int:
    """Entry point with one-line errors."""
    return exit_code_of(run, RankFailedError)


if __name__ == "__main__":
    raise SystemExit(main())
