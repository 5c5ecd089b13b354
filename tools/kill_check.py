#!/usr/bin/env python3
"""Kill a training run again and again, and prove that nothing was lost and nothing went wrong.

A command is started, one of its processes is killed with SIGKILL at a random moment, and the command is started again,
as often as --kills says; then it runs to its end. The victim is a rank or the launcher. The moment lies shortly after a
start, between steps, or, in a good part of the rounds, inside a save: some milliseconds after its unpublished folder
has appeared. Checkpoints are written at once and in the background (--async-save), round by round.

After every kill all other processes of the job must end by themselves within --end-timeout-s, every published
checkpoint must be whole, byte for byte, the newest one must not be older than before, and the next start must go on
from it. At the end the losses and gradient norms of every step must be those of a run that nobody killed, bit for bit.
With several --layout, which take turns, sums differ in order, and losses may differ by --tolerance (relative).

Starts are warm: processes are forked from one that has torch imported, and several ranks run below torch's elastic
agent, as below torchrun. They are real processes; what is left out is the start of the interpreter. --cold starts the
commands themselves. With --folder the tool may be stopped, too: it goes on where it was. Linux only.

All flags of the entry points are accepted too. Layouts are those of tools/parity.py by name.

    python tools/kill_check.py --kills 20
    python tools/kill_check.py --kills 200 --layout "one process" --seed 7 --folder kills --json kills.json
    python tools/kill_check.py --kills 5 --cold
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import resolve_config
from megatron_glue.config.validation import validate
from megatron_glue.parallel import local_ranks
from megatron_glue.proofs.kill_trial import FLAGS, MOMENTS, KillTrial, Round, TrialSettings
from megatron_glue.proofs.layouts import read_layouts
from megatron_glue.proofs.local_jobs import PRELOADED
from megatron_glue.proofs.sample_documents import write_sample_documents
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.exit_codes import exit_code_of
from megatron_glue.training.presets import GPT_DEFAULTS
from megatron_glue.training.summary import check_writable_file, write_json

LAYOUTS = Path(__file__).with_name("parity_layouts.yaml")
NUM_DOCUMENTS = 60
SMALL = ("--num-layers", "2", "--moe-layer-freq", "0", "1", "--global-batch-size", "4")


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Split this tool's own flags from those of the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="default 20")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of moments and victims (default 0)")
    parser.add_argument("--layout", nargs="+", metavar="NAME", default=["ep 2"], help="which take turns (default ep 2)")
    parser.add_argument("--layouts", metavar="F", default=str(LAYOUTS), help="YAML file of models and layouts")
    parser.add_argument("--model", default="moe", metavar="NAME", help="a model of that file (default moe)")
    parser.add_argument("--cold", action="store_true", help="start the commands themselves, imports included")
    parser.add_argument("--folder", metavar="D", help="keep everything and go on there (default: a temporary one)")
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, metavar="X", help="of losses when layouts take turns (1e-3)"
    )
    parser.add_argument("--end-timeout-s", type=float, default=30.0, metavar="S", help="for others to end (default 30)")
    parser.add_argument(
        "--run-timeout-s", type=float, metavar="S", help="of one start (default 900, or 2 per step where that is more)"
    )
    parser.add_argument("--json", metavar="F", help="write all rounds there")
    arguments, rest = parser.parse_known_args()
    for name in ("kills", "tolerance", "end_timeout_s", "run_timeout_s"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')}", value, "not positive", "give more")
    return arguments, rest


def summarise(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """One row of figures per kind of kill."""
    rows = []
    for moment in dict.fromkeys(MOMENTS):
        for victim in ("a rank", "launcher"):
            for saves in ("sync", "async"):
                kind = (moment, saves, victim == "launcher")
                chosen = [r for r in rounds if (r.plan.moment, r.plan.saves, r.plan.victim == "launcher") == kind]
                if chosen:
                    rows.append(
                        {
                            "moment": moment,
                            "victim": victim,
                            "saves": saves,
                            "kills": len(chosen),
                            "save_left_unfinished": sum(r.unfinished for r in chosen),
                            "longest_end_s": max(r.end_seconds for r in chosen),
                            "failures": sum(bool(r.failures) for r in chosen),
                        }
                    )
    return rows


def print_table(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Show the summary."""
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        is_word = column in ("moment", "victim", "saves")
        table.add_column(column.replace("_", " "), justify="left" if is_word else "right")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=110).print(table)


def run() -> int:
    """Kill, finish, compare, show, write, judge."""
    arguments, rest = parse_arguments()
    listed = read_layouts(arguments.layouts)
    model_flags = listed.flags_of(arguments.model)
    layouts = [listed.find(name, "--layout") for name in arguments.layout]
    if arguments.json:
        check_writable_file(arguments.json, "--json")
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(arguments.folder or stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        corpus = write_sample_documents(folder / "documents.jsonl", NUM_DOCUMENTS)
        settings = TrialSettings(
            arguments.kills,
            arguments.seed,
            arguments.tolerance,
            arguments.cold,
            arguments.end_timeout_s,
            arguments.run_timeout_s,
        )
        flags = [*model_flags, *SMALL, *FLAGS, "--data-path", str(corpus), "--device", "cpu"]
        flags += ["--train-iters", str(settings.num_steps), *rest]
        for layout in layouts:
            words = [*flags, *layout.flags]
            validate(resolve_config(words, {}, GPT_DEFAULTS, "tools/kill_check.py").config, layout.world_size)
        trial = KillTrial(folder, flags, layouts, settings)
        local_ranks.preload(PRELOADED)
        console = Console(stderr=True)
        for result in trial.rounds():
            plan = result.plan
            victim = plan.victim if plan.victim == "launcher" else f"rank {plan.victim}"
            line = (
                f"{plan.number + 1}/{arguments.kills} {plan.layout}, {plan.saves}: killed {victim} while {plan.moment}"
            )
            line += f", step {result.published} stands; {'; '.join(result.failures) or 'ok'}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        rounds = trial.noted()
        console.print("running to the end, and once more without kills", highlight=False)
        failures, figures = trial.finish()
    rows = summarise(rounds)
    print_table(rows, f"{len(rounds)} kills, {', '.join(arguments.layout)}, {time.monotonic() - start:.0f} s")
    failures = [f"kill {r.plan.number + 1}: {line}" for r in rounds for line in r.failures] + failures
    for failure in failures:
        print(f"FAILED {failure}")
    shown = [f"{name.replace('_', ' ')} {value:.1e}" for name, value in figures.items() if name != "steps"]
    print(f"{figures['steps']} steps: {', '.join(shown)}")
    if arguments.json:
        rounds_json = [asdict(result) for result in rounds]
        write_json(arguments.json, {"rounds": rounds_json, "summary": rows, "course": figures, "failures": failures})
    return 1 if failures else 0


def main() -> int:
    """Entry point with one-line errors."""
    return exit_code_of(run, CheckpointError)


if __name__ == "__main__":
    raise SystemExit(main())
