#!/usr/bin/env python3
"""Prove that a resumed run continues the run that was stopped.

A run of 2N steps without a stop is compared with runs of the same command that were stopped and started again, through
real checkpoints, each start in new processes:

- stopped at step N, where the first epoch ends with the last pack of the step;
- stopped twice, in the middle of epochs;
- started from the checkpoint of step N of the straight run, which had trained on after saving it.

Micro-batches (pack ids, tokens, boundaries), losses, gradient norms and every tensor of the last checkpoint (weights,
moments, balancing biases, random generators) must be equal bit for bit, with checkpoints written at once and in the
background (--async-save). On a GPU sums have no fixed order; this tool compares on the CPU.

Another layout sums in another order. There, the packs of every step must be equal and no pack may be left out or come
twice. Losses, gradient norms, and every tensor of the last checkpoint by itself may differ by what
docs/parity.md states for their kind; optimizer steps may not differ, and no tensor may be missing or new, but for the
random generators, which belong to ranks.

Layouts are those of tools/parity.py by name (--layouts for your own list). Exit code 1 if anything differs. All flags
of the entry points are accepted too and hold for every run.

    python tools/resume_check.py
    python tools/resume_check.py --layout "tp 2 sp" --saves async
    python tools/resume_check.py --before "pp 2 1f1b" --after "ep 2" --json resume.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import resolve_config
from megatron_glue.config.sections import RunConfig
from megatron_glue.config.validation import validate
from megatron_glue.data.documents import build_datasets
from megatron_glue.data.pack_stream import PackStream
from megatron_glue.data.tokenizer import build_tokenizer
from megatron_glue.parallel import local_ranks
from megatron_glue.parallel.local_ranks import RankFailedError
from megatron_glue.proofs.courses import Case, CourseRunner, Stage, Verdict, judge
from megatron_glue.proofs.layouts import LayoutList, read_layouts
from megatron_glue.proofs.local_training import LocalRunError
from megatron_glue.proofs.sample_documents import write_sample_documents
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.exit_codes import exit_code_of
from megatron_glue.training.presets import GPT_DEFAULTS
from megatron_glue.training.summary import check_writable_file, write_json

LAYOUTS = Path(__file__).with_name("parity_layouts.yaml")
SAME_LAYOUT = ("one process", "ep 2")
TRANSITIONS = (
    ("one process", "dp 2"),
    ("ep 2", "one process"),
    ("dp 2 fsdp2 zero 2", "ep 2"),
    ("tp 2 sp", "pp 2 1f1b"),
    ("cp 2 ring", "tp 2 sp"),
)
MAX_DOCUMENTS = 2000
SHOWN_KINDS = {
    "losses": "losses",
    "grad_norms": "norms",
    "weights": "weights",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
}
QUIET = ("--sample-tokens", "0", "--eval-iters", "1", "--eval-interval", "0", "--save-interval", "1")


def choose_cases(arguments: argparse.Namespace, layouts: LayoutList) -> list[Case]:
    """The cases that were asked for.

    Raises:
        ConfigError: For a layout that is not in the list.
    """
    middle, num_steps = arguments.steps, 2 * arguments.steps
    a, b = -(-num_steps // 3), -(-2 * num_steps // 3)
    same = [layouts.find(name, "--layout") for name in arguments.layout or ()]
    pairs = [(arguments.before, arguments.after)] if arguments.before else []
    if not same and not pairs:
        known = {layout.name for layout in layouts.layouts}
        same = [layouts.find(name, "--layout") for name in SAME_LAYOUT if name in known]
        pairs = [pair for pair in TRANSITIONS if known.issuperset(pair)]
    changes = [(layouts.find(before, "--before"), layouts.find(after, "--after")) for before, after in pairs]
    cases = []
    for saves in ("sync", "async") if arguments.saves == "both" else (arguments.saves,):
        for layout in same:
            name, end = layout.name, Stage(layout)
            cases += [
                Case(f"{name}: stop at {middle}, an epoch's end", (Stage(layout, middle), end), saves),
                Case(f"{name}: stops at {a} and {b}", (Stage(layout, a), Stage(layout, b), end), saves),
                Case(f"{name}: back to {middle}", (Stage(layout, middle, goes_back=True),), saves),
            ]
        for before, after in changes:
            cases.append(Case(f"{before.name} -> {after.name}", (Stage(before, middle), Stage(after)), saves))
    return cases


def write_epoch(path: Path, config: RunConfig, num_packs: int) -> None:
    """Write as many documents as make an epoch of exactly so many packs.

    Args:
        path: The file, which ``config`` names as its data.
        config: How documents are held out and packed.
        num_packs: Packs of the first epoch.

    Raises:
        ConfigError: If no number of documents does.
    """
    data, seed = config.data, config.training.seed
    for num_documents in range(num_packs // 2, MAX_DOCUMENTS):
        write_sample_documents(path, num_documents)
        train, _ = build_datasets(data, build_tokenizer(data), seed)
        stream = PackStream(train, data.seq_length, data.packing_window, seed, data.segment_alignment)
        found = stream.plan(0).num_packs
        if found == num_packs:
            return
        if found > num_packs + 2:
            break
    reason = f"no number of sample documents makes an epoch of {num_packs} packs"
    raise ConfigError("--steps", num_packs, reason, "use another number of steps, or another --seq-length")


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Split this tool's own flags from those of the runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="half of a run's steps (default 6)")
    parser.add_argument("--layout", nargs="+", metavar="NAME", help="layouts that are stopped and resumed as they are")
    parser.add_argument("--before", metavar="NAME", help="layout up to the stop, with --after")
    parser.add_argument("--after", metavar="NAME", help="layout from the stop on")
    parser.add_argument("--saves", choices=("both", "sync", "async"), default="both", help="default: both")
    parser.add_argument("--layouts", metavar="F", default=str(LAYOUTS), help="YAML file of models and layouts")
    parser.add_argument("--model", default="moe", metavar="NAME", help="a model of that file (default moe)")
    parser.add_argument("--timeout-s", type=float, default=180.0, metavar="S", help="per start (default 180)")
    parser.add_argument("--json", metavar="F", help="write all results there")
    arguments, rest = parser.parse_known_args()
    if arguments.steps < 3:
        raise ConfigError("--steps", arguments.steps, "leaves no room for two stops", "use at least 3")
    if not arguments.timeout_s > 0:
        raise ConfigError("--timeout-s", arguments.timeout_s, "not a positive number", "give a larger one")
    if (arguments.before is None) != (arguments.after is None):
        raise ConfigError("--before", arguments.before or "", "goes with --after", "give both or none")
    if "--data-path" in rest:
        raise ConfigError("--data-path", "", "an epoch must end with step N", "leave it out: the tool writes its own")
    return arguments, rest


def run_case(runner: CourseRunner, case: Case, num_packs: int) -> Verdict:
    """Run one case; whatever goes wrong in it stays in it."""
    start = time.monotonic()
    try:
        _, straight = runner.straight(case.stages[0].layout, case.saves)
        _, course = runner.run(case.stages, case.saves)
        verdict = judge(case, course, straight, num_packs)
    except (LocalRunError, CheckpointError) as error:
        verdict = Verdict(case, [str(error)])
    except RankFailedError as error:
        verdict = Verdict(case, [f"rank {error.rank}: {str(error).strip().splitlines()[-1]}"])
    verdict.seconds = time.monotonic() - start
    return verdict


def print_table(verdicts: Sequence[Verdict], title: str) -> None:
    """Show one line per case, with the largest difference of each kind."""
    table = Table(title=title, title_justify="left")
    for column in ("course", "saves", "must be", *SHOWN_KINDS.values(), "s", ""):
        table.add_column(column, justify="right" if column in (*SHOWN_KINDS.values(), "s") else "left")
    for verdict in verdicts:
        case = verdict.case
        worst = [verdict.differences.get(kind) for kind in SHOWN_KINDS]
        shown = ["-" if difference is None else f"{difference.value:.1e}" for difference in worst]
        kind = "bit-equal" if case.is_exact else "within rounding"
        status = "FAILED" if verdict.failures else "ok"
        table.add_row(case.name, case.saves, kind, *shown, f"{verdict.seconds:.1f}", status)
    Console(width=130).print(table)


def run() -> int:
    """Choose, run, show, write, judge."""
    arguments, rest = parse_arguments()
    layouts = read_layouts(arguments.layouts)
    model_flags, cases = layouts.flags_of(arguments.model), choose_cases(arguments, layouts)
    if arguments.json:
        check_writable_file(arguments.json, "--json")
    start, num_steps = time.monotonic(), 2 * arguments.steps
    local_ranks.preload(["megatron_glue.proofs.local_training"])
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "documents.jsonl"
        flags = [*model_flags, *QUIET, "--data-path", str(corpus), "--device", "cpu"]
        flags += ["--train-iters", str(num_steps), "--keep-last", str(num_steps), *rest]
        config = resolve_config(flags, {}, GPT_DEFAULTS, "tools/resume_check.py").config
        for layout in {stage.layout.name: stage.layout for case in cases for stage in case.stages}.values():
            words = [*flags, *layout.flags]
            validate(resolve_config(words, {}, GPT_DEFAULTS, "tools/resume_check.py").config, layout.world_size)
        num_epoch_packs = arguments.steps * config.training.global_batch_size
        write_epoch(corpus, config, num_epoch_packs)
        runner = CourseRunner(folder, flags, num_steps, arguments.timeout_s)
        console = Console(stderr=True)
        for number, case in enumerate(cases, start=1):
            with console.status(f"{number}/{len(cases)} {case.name}, {case.saves}"):
                verdicts.append(run_case(runner, case, 2 * num_epoch_packs))
            status = "; ".join(verdicts[-1].failures) or "ok"
            line = f"{number}/{len(cases)} {case.name}, {case.saves}: {status}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    num_failed = sum(bool(verdict.failures) for verdict in verdicts)
    print_table(verdicts, f"{num_steps} steps, stopped and resumed, against {num_steps} steps in one go")
    for verdict in verdicts:
        for failure in verdict.failures:
            print(f"FAILED {verdict.case.name}, {verdict.case.saves}: {failure}")
    print(f"{len(verdicts) - num_failed} ok, {num_failed} failed, {time.monotonic() - start:.0f} s")
    if arguments.json:
        write_json(arguments.json, {"steps": num_steps, "cases": [verdict.as_json() for verdict in verdicts]})
    return 1 if num_failed else 0


def main() -> int:
    """Entry point with one-line errors."""
    return exit_code_of(run)


if __name__ == "__main__":
    raise SystemExit(main())
