#!/usr/bin/env python3
"""Train beside Hugging Face transformers and megatron-core: the same sizes, data and dtype, one machine, one run.

Every contestant is a process of its own that holds one model and takes one training step when it is told to: forward,
backward, AdamW, and the loss read on the host. They take turns step by step in rotating order, so that a slow moment of
the machine falls on all of them. One process does nothing but the model's matrix products, by torch and by the products
that this project chose here: the machine's rate on the model's own shapes.

The first steps of each are not counted. Ratios are medians over rounds of peer time / our time, each pair of one round.
Nobody clips gradients; nobody has a z-loss. transformers trains with its Trainer's default, fused AdamW, and once with
the default of the AdamW class. Peers that are not installed, or cannot do a case, are listed with the reason.

    python tools/bench/peers.py --peer-python peers/bin/python
    python tools/bench/peers.py --cases dense "MoE, 64 experts top-4" --rounds 5 --json peers.json
    python tools/bench/peers.py --cases "dense, packed" --without-peers --row-tokens 16384
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import cpu_count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_glue.config.environment import read_environment
from megatron_glue.config.errors import ConfigError
from megatron_glue.parallel.local_ranks import free_port
from megatron_glue.training.summary import write_json, write_text

WORKERS = Path(__file__).resolve().parent / "peer_workers"
sys.path.insert(0, str(WORKERS))

from gemm import num_attention_flops, num_flops  # noqa: E402 # pyright: ignore[reportMissingImports]
from page import markdown, table_cells  # noqa: E402 # pyright: ignore[reportMissingImports]
from protocol import QUIT, STEP, BenchSpec  # noqa: E402 # pyright: ignore[reportMissingImports]

OURS, OURS_OFFLOADED = "megatron_glue", "megatron_glue, double buffer"
SHORT_DOCUMENTS = (32, 512)


@dataclass(frozen=True)
class Contestant:
    """One implementation.

    Attributes:
        name: In tables.
        worker: Its file in ``peer_workers``.
        variant: See that file.
        is_peer: Whether it lives in the peers' environment and counts as one.
    """

    name: str
    worker: str
    variant: str
    is_peer: bool = True


GEMM_TORCH = Contestant("products alone, torch.mm", "gemm.py", "torch", is_peer=False)
GEMM_BEST = Contestant("products alone, --matmul-backend auto", "gemm.py", "auto", is_peer=False)
OWN = Contestant(OURS, "ours.py", "--use-packed-cache", is_peer=False)
OWN_OFFLOADED = Contestant(OURS_OFFLOADED, "ours.py", "--use-packed-cache --double-buffer-ckpt", is_peer=False)
MEGATRON = Contestant("megatron-core, local spec", "megatron_core.py", "")
DENSE = (
    GEMM_TORCH,
    GEMM_BEST,
    OWN,
    OWN_OFFLOADED,
    Contestant("transformers Llama, sdpa, fused AdamW", "huggingface.py", "llama/-/fused"),
    Contestant("transformers Llama, sdpa, AdamW as it comes", "huggingface.py", "llama/-/default"),
    MEGATRON,
)
EXPERTS = (
    GEMM_TORCH,
    GEMM_BEST,
    OWN,
    OWN_OFFLOADED,
    Contestant("transformers Mixtral, eager", "huggingface.py", "mixtral/eager/fused"),
    Contestant("transformers Mixtral, grouped_mm", "huggingface.py", "mixtral/grouped_mm/fused"),
    Contestant("transformers Qwen3-MoE, grouped_mm", "huggingface.py", "qwen3moe/grouped_mm/fused"),
    MEGATRON,
)
# Deep and narrow, so that activations outweigh the weights with their gradients and moments, and the libraries.
DEEP = {"num_layers": 16, "hidden_size": 128, "num_heads": 2, "ffn_hidden_size": 512, "row_tokens": 2048}
PACKED = {"num_rows": 1, "row_tokens": 4096, "document_tokens": SHORT_DOCUMENTS}


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        spec: Sizes.
        contestants: Who takes part.
    """

    spec: BenchSpec
    contestants: tuple[Contestant, ...]


CASES: dict[str, Case] = {
    "dense": Case(BenchSpec(), DENSE),
    "MoE, 8 experts top-2": Case(BenchSpec(num_experts=8, top_k=2), EXPERTS),
    "dense, packed": Case(BenchSpec(**PACKED), DENSE),
    "MoE, 8 experts top-2, packed": Case(BenchSpec(num_experts=8, top_k=2, **PACKED), EXPERTS),
    "MoE, 64 experts top-4": Case(BenchSpec(num_experts=64, top_k=4, ffn_hidden_size=64), EXPERTS),
    "MoE, 128 experts top-8": Case(BenchSpec(num_experts=128, top_k=8, ffn_hidden_size=64), EXPERTS),
    "dense, 16 layers hidden 128": Case(BenchSpec(**DEEP), DENSE),
    "MoE, 8 experts top-2, EP 2": Case(
        BenchSpec(num_experts=8, top_k=2, world_size=2, num_threads=1), (GEMM_TORCH, GEMM_BEST, OWN, MEGATRON)
    ),
}


@dataclass
class Team:
    """The processes of one contestant.

    Attributes:
        contestant: Who.
        absent: Why it does not take part; empty if it does.
        facts: What it says about itself.
        times_s: Wall time of each counted step, of the slowest process.
        losses: Of each step, the first ones included.
        peak_bytes: Peak resident memory, summed over its processes.
    """

    contestant: Contestant
    absent: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @classmethod
    def start(cls, contestant: Contestant, spec: BenchSpec, python: str, environ: Mapping[str, str]) -> Team:
        """Start its processes and wait until they are built."""
        team = cls(contestant)
        world = {"WORLD_SIZE": str(spec.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        spec = replace(spec, variant=contestant.variant)
        for rank in range(spec.world_size):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(spec.world_size)}
            own = world | ranks if spec.world_size > 1 or contestant is MEGATRON else {}
            team._processes.append(
                subprocess.Popen(  # noqa: S603 the interpreter is the user's own argument
                    [python, str(WORKERS / contestant.worker), spec.to_json(), str(rank)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**environ, **own},
                )
            )
        answers = [team._answer(process) for process in team._processes]
        team.facts = answers[0]
        team.absent = next((answer["absent"] for answer in answers if "absent" in answer), "")
        return team

    def step(self, is_counted: bool) -> None:
        """Take one step with all processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(STEP + "\n")
            process.stdin.flush()
        answers = [self._answer(process) for process in self._processes]
        if "absent" in answers[0]:
            self.absent = answers[0]["absent"]
            return
        self.losses.append(statistics.mean(answer["loss"] for answer in answers))
        self.peak_bytes = sum(answer["peak_bytes"] for answer in answers)
        if is_counted:
            self.times_s.append(max(answer["wall_s"] for answer in answers))

    def stop(self) -> None:
        """End its processes."""
        for process in self._processes:
            if process.poll() is None and process.stdin is not None:
                try:
                    process.stdin.write(QUIT + "\n")
                    process.stdin.close()
                    process.wait(timeout=20)
                except (BrokenPipeError, subprocess.TimeoutExpired):
                    process.kill()
                    process.wait()

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if line:
            return json.loads(line)
        process.wait()
        assert process.stderr is not None
        told = process.stderr.read().strip().splitlines() or [f"exit code {process.returncode}"]
        return {"absent": told[-1][:200]}


def run_case(case: Case, arguments: argparse.Namespace, console: Console) -> list[Team]:
    """Let the contestants of a case take turns.

    Args:
        case: The case.
        arguments: Rounds, threads, interpreters.
        console: For progress.

    Returns:
        All of them, the absent ones too.
    """
    own_environ = dict(read_environment())
    peer_environ = {**own_environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TORCHDYNAMO_DISABLE": "1"}
    # What the peers import is their environment's; this project's folder must not be on their path.
    peer_environ["PYTHONPATH"] = arguments.mcore or ""
    spec = case.spec if case.spec.world_size > 1 else replace(case.spec, num_threads=arguments.threads)
    teams: list[Team] = []
    try:
        for contestant in case.contestants:
            if contestant.is_peer and arguments.without_peers:
                continue
            python = arguments.peer_python if contestant.is_peer else sys.executable
            environ = peer_environ if contestant.is_peer else own_environ
            teams.append(Team.start(contestant, spec, python, environ))
            console.print(f"  {contestant.name}: {teams[-1].absent or 'ready'}", highlight=False)
        for round_index in range(arguments.warmup + arguments.rounds):
            present = [team for team in teams if not team.absent]
            shift = round_index % len(present)
            for team in present[shift:] + present[:shift]:
                team.step(round_index >= arguments.warmup)
            console.print(f"  round {round_index + 1}/{arguments.warmup + arguments.rounds}", highlight=False)
    finally:
        for team in teams:
            team.stop()
    return teams


def report(case: Case, teams: Sequence[Team]) -> list[dict[str, Any]]:
    """One row per contestant, with ratios to ours and shares of the machine's rate."""
    by_name = {team.contestant.name: team for team in teams}
    ours, gemm = by_name[OURS], by_name[GEMM_TORCH.name]
    products = num_flops(case.spec)
    attention = num_attention_flops(case.spec)
    rate = products / statistics.median(gemm.times_s)
    rows = []
    for team in teams:
        row: dict[str, Any] = {"name": team.contestant.name, "absent": team.absent, **team.facts}
        if not team.absent:
            median_s = statistics.median(team.times_s)
            is_gemm = team.contestant.worker == "gemm.py"
            row |= {
                "median_s": median_s,
                "min_s": min(team.times_s),
                "max_s": max(team.times_s),
                "tokens_per_s": case.spec.num_tokens * case.spec.world_size / median_s,
                "ratio_to_ours": statistics.median(
                    other / own for other, own in zip(team.times_s, ours.times_s, strict=True)
                ),
                "gflops": (products + (0 if is_gemm else attention)) / median_s / 1e9,
                "share_of_torch_mm": (products + (0 if is_gemm else attention)) / median_s / rate,
                "peak_mib": team.peak_bytes / 2**20,
                "first_loss": team.losses[0],
                "last_loss": team.losses[-1],
                "is_peer": team.contestant.is_peer,
                "times_s": team.times_s,
            }
        rows.append(row)
    return rows


def describe_data(spec: BenchSpec) -> str:
    """What a step trains on."""
    packed = (
        f", packed from documents of {spec.document_tokens[0]}-{spec.document_tokens[1]}"
        if spec.document_tokens
        else ""
    )
    return f"{spec.num_rows} x {spec.row_tokens} tokens{packed}; {spec.world_size} process(es)"


def print_table(title: str, rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Show a case, and how ours stands below it."""
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("step s", "min-max", "tokens/s", "ours is", "GFLOP/s", "of torch.mm", "peak MiB"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        if not row["absent"]:
            table.add_row(*table_cells(row))
    console.print(table)
    for row in rows:
        if row["absent"]:
            console.print(f"{row['name']}: absent: {row['absent']}", highlight=False)
    if told := verdict(rows):
        console.print(f"ours: {told}\n", highlight=False)


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Ours against the fastest and against the smallest peer, and what the double buffer saves; empty without peers."""
    best = best_peer(rows)
    if best is None:
        return ""
    offloaded = next((row for row in rows if row["name"] == OURS_OFFLOADED and not row["absent"]), None)
    own = next(row for row in rows if row["name"] == OURS)
    memory = own["peak_mib"] / min(row["peak_mib"] for row in rows if row.get("is_peer") and not row["absent"])
    told = (
        f"{best['ratio_to_ours']:.2f}x the speed of the fastest peer ({best['name']}), {memory:.2f}x the memory of the "
        "smallest"
    )
    if offloaded is None:
        return told
    return f"{told}; with the double buffer {1 - offloaded['peak_mib'] / own['peak_mib']:.0%} less memory than without"


def best_peer(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The fastest peer of a case; ``None`` if all are absent."""
    present = [row for row in rows if not row["absent"] and row["is_peer"]]
    return min(present, key=lambda row: row["ratio_to_ours"], default=None)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ConfigError: On numbers or names that make no measurement.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cases", nargs="+", metavar="NAME", default=list(CASES), help=f"of {list(CASES)} (all)")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="counted steps of each (default 10)")
    parser.add_argument("--warmup", type=int, default=3, metavar="N", help="steps before them (default 3)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of each process (default 2; EP 2: 1)")
    parser.add_argument("--peer-python", default=sys.executable, metavar="P", help="interpreter that has the peers")
    parser.add_argument("--mcore", metavar="D", help="unpacked source archive of megatron-core; unset: as installed")
    parser.add_argument("--without-peers", action="store_true", help="this project alone, beside the products alone")
    parser.add_argument("--row-tokens", type=int, metavar="N", help="tokens of a row, in place of each case's own")
    parser.add_argument("--json", metavar="F", help="write all figures there")
    parser.add_argument("--markdown", metavar="F", help="write a page there, as docs/peers.md")
    parser.add_argument("--machine", default=f"{cpu_count()} CPU cores", metavar="TEXT", help="named in that page")
    arguments = parser.parse_args(words)
    for name, least in (("rounds", 1), ("warmup", 0), ("threads", 1)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name}", getattr(arguments, name), "too few", f"use at least {least}")
    if arguments.row_tokens is not None and arguments.row_tokens < 2:
        raise ConfigError("--row-tokens", arguments.row_tokens, "too few", "use at least 2")
    for name in arguments.cases:
        if name not in CASES:
            raise ConfigError("--cases", name, "no such case", f"use some of {list(CASES)}")
    return arguments


def main() -> int:
    """Measure, show, write."""
    try:
        arguments = parse_arguments()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console, result, pages = Console(width=150), {}, {}
    for name in arguments.cases:
        progress = Console(stderr=True)
        progress.print(name, highlight=False)
        case = CASES[name]
        if arguments.row_tokens is not None:
            case = replace(case, spec=replace(case.spec, row_tokens=arguments.row_tokens))
        teams = run_case(case, arguments, progress)
        if absent := next((team.absent for team in teams if team.contestant.name == OURS), ""):
            print(f"error: {name}: {absent}", file=sys.stderr)
            return 1
        result[name] = report(case, teams)
        print_table(f"{name}: {describe_data(case.spec)}", result[name], console)
        pages[name] = describe_data(case.spec), result[name]
        if arguments.json:
            write_json(arguments.json, result)
        if arguments.markdown:
            verdicts = {done: told for done, rows in result.items() if (told := verdict(rows))}
            text = markdown(pages, arguments.machine, arguments.rounds, verdicts)
            write_text(arguments.markdown, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
