#!/usr/bin/env python3
"""Measure what the cost of a step depends on: tokens, experts, and the length of rows packed from short documents.

    grouping   one-pass grouping over the number of tokens (fitted exponent: 1 is linear) and over the number of experts
               (largest / smallest time), one mask per expert beside it
    layer      one MoE layer (router, dispatch, experts, combine; forward and backward) against its matrix products
               alone: with equal shares of rows by torch.mm, and by the grouped product that the layer has
    step       time per token of whole training steps over rows of several lengths, each a process of its own, in turns

Times are medians over rounds, in which the ways, or the row lengths, take turns in rotating order. A --*-at-most turns
a figure into a condition: exit code 1 if it is above. The figures of a busy machine say nothing; run it alone.

    python tools/bench/scaling.py
    python tools/bench/scaling.py --exponent-at-most 1.1 --experts-at-most 1.5 --layer-at-most 1.8 --step-at-most 1.1
    python tools/bench/scaling.py --only step --row-tokens 1024 16384 --rounds 5 --markdown scaling.md --png scaling.png
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from os import cpu_count
from pathlib import Path

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "peer_workers"))

from gemm import feed_forward_products, multiplication  # pyright: ignore[reportMissingImports]
from ours import open_session  # pyright: ignore[reportMissingImports]
from peers import OWN, SHORT_DOCUMENTS, Team  # pyright: ignore[reportMissingImports]
from protocol import BenchSpec  # pyright: ignore[reportMissingImports]
from sweep import Sweep, draw, fitted_exponent, markdown, max_to_min, print_sweep  # pyright: ignore[reportMissingImports]
from turns import take_turns  # pyright: ignore[reportMissingImports]

from megatron_glue.backends.registry import Backends, resolve
from megatron_glue.config.environment import read_environment
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import BackendConfig
from megatron_glue.moe.layer import MoELayer
from megatron_glue.ops.grouping import group_tokens
from megatron_glue.parallel.host_allocator import keep_freed_memory
from megatron_glue.proofs.pictures import load_pyplot
from megatron_glue.training.exit_codes import exit_code_of
from megatron_glue.training.summary import check_writable_file, write_json, write_text
from megatron_glue.types import ForwardContext, PackedSequence

CPU = torch.device("cpu")
GROUPING_TOP_K = 8
TOKENS_OF_EXPERT_SWEEP, EXPERTS_OF_TOKEN_SWEEP = 16384, 64
TURN_TOKENS = 4096
"""Rows shorter than this take several steps in a turn, so that all turns are long enough to be timed."""


def grouping_ways(num_tokens: int, num_experts: int) -> dict[str, Callable[[], object]]:
    """The one pass and the loop over masks, on the same pairs."""
    top_k = min(GROUPING_TOP_K, num_experts)
    ids_TK = torch.rand(num_tokens, num_experts).topk(top_k).indices.contiguous()
    return {
        "one pass": lambda: group_tokens(ids_TK, num_experts, method="one-pass"),
        "mask per expert": lambda: group_tokens(ids_TK, num_experts, method="loop"),
    }


def measure_grouping(arguments: argparse.Namespace) -> list[Sweep]:
    """Over tokens, and over experts."""

    def times_of(num_tokens: int, num_experts: int) -> tuple[float, float]:
        ways = grouping_ways(num_tokens, num_experts)
        take_turns(ways, 1, CPU)
        times_ms = take_turns(ways, arguments.repeats, CPU)
        return statistics.median(times_ms["one pass"]), statistics.median(times_ms["mask per expert"])

    columns = ("one pass ms", "mask per expert ms")
    tokens, experts = arguments.grouping_tokens, arguments.grouping_experts
    over_tokens = tuple(times_of(count, EXPERTS_OF_TOKEN_SWEEP) for count in tokens)
    over_experts = tuple(times_of(TOKENS_OF_EXPERT_SWEEP, count) for count in experts)
    one_pass, masks = zip(*over_experts, strict=True)
    exponent = {"exponent in tokens": fitted_exponent(tokens, [row[0] for row in over_tokens])}
    ratio = {"max / min over experts": max_to_min(one_pass), "mask per expert": max_to_min(masks)}
    return [
        Sweep(
            f"grouping over tokens, {EXPERTS_OF_TOKEN_SWEEP} experts top-{GROUPING_TOP_K}",
            "tokens",
            columns,
            tuple(tokens),
            over_tokens,
            exponent,
            {"exponent in tokens": arguments.exponent_at_most},
        ),
        Sweep(
            f"grouping over experts, {TOKENS_OF_EXPERT_SWEEP} tokens top-{GROUPING_TOP_K}",
            "experts",
            columns,
            tuple(experts),
            over_experts,
            ratio,
            {"max / min over experts": arguments.experts_at_most},
        ),
    ]


def layer_ways(spec: BenchSpec, backends: Backends) -> dict[str, Callable[[], object]]:
    """The MoE layer of a real session, and its products alone in two ways."""
    layer = next(part for part in open_session(spec, 0).engine.module.modules() if isinstance(part, MoELayer))
    context = ForwardContext(PackedSequence.from_lengths([spec.num_tokens]))
    x_TD = torch.randn(spec.num_tokens, spec.hidden_size, requires_grad=True)
    grad_TD = torch.randn_like(x_TD)

    def whole_layer() -> object:
        return torch.autograd.grad(layer(x_TD, context), [x_TD, *layer.parameters()], grad_TD)

    return {
        "layer": whole_layer,
        "products, torch.mm": multiplication(feed_forward_products(spec), None),
        "products, own": own_products(spec, backends),
    }


def own_products(spec: BenchSpec, backends: Backends) -> Callable[[], object]:
    """The router's product and the two grouped ones, forward and backward, on equal shares of rows."""
    router, *projections = feed_forward_products(spec)
    multiply_router = multiplication([router], backends.matmul)
    operands = []
    for num_experts, rows, inner, outer in projections:
        x_RI = torch.randn(num_experts * rows, inner, requires_grad=True)
        weight_eOI = torch.randn(num_experts, outer, inner, requires_grad=True)
        offsets_e = torch.arange(1, num_experts + 1) * rows
        operands.append((x_RI, weight_eOI, offsets_e, torch.randn(num_experts * rows, outer)))

    def multiply() -> None:
        multiply_router()
        for x_RI, weight_eOI, offsets_e, grad_RO in operands:
            out_RO = backends.grouped_mm(x_RI, weight_eOI.transpose(1, 2), offsets_e)
            torch.autograd.grad(out_RO, [x_RI, weight_eOI], grad_RO)

    return multiply


def measure_layer(arguments: argparse.Namespace) -> list[Sweep]:
    """One line per layer; a ratio is the median over rounds."""
    backends = resolve(BackendConfig(), CPU, torch.float32, head_dim=arguments.hidden)
    rows, figures, names = [], {}, []
    for num_experts, top_k, ffn_size in arguments.moe_layers:
        spec = BenchSpec(
            num_experts=num_experts,
            top_k=top_k,
            ffn_hidden_size=ffn_size,
            vocab_size=64,
            hidden_size=arguments.hidden,
            num_layers=1,
            num_heads=1,
            num_rows=1,
            row_tokens=arguments.layer_tokens,
            num_threads=arguments.threads,
            variant=OWN.variant,
        )
        ways = layer_ways(spec, backends)
        take_turns(ways, 2, CPU)
        times_ms = take_turns(ways, arguments.repeats, CPU)
        ratios = [
            statistics.median(whole / part for whole, part in zip(times_ms["layer"], times_ms[limit], strict=True))
            for limit in ("products, torch.mm", "products, own")
        ]
        rows.append((*(statistics.median(times_ms[way]) for way in ways), *ratios))
        names.append(f"{num_experts} experts top-{top_k} ffn {ffn_size}")
        figures[names[-1]] = ratios[0]
    return [
        Sweep(
            f"MoE layer, {arguments.layer_tokens} tokens hidden {arguments.hidden}, forward and backward",
            "layer",
            ("layer ms", "torch.mm ms", "own products ms", "layer / torch.mm", "layer / own products"),
            tuple(names),
            tuple(rows),
            figures,
            dict.fromkeys(names, arguments.layer_at_most),
        )
    ]


def measure_step(arguments: argparse.Namespace) -> list[Sweep]:
    """Processes that take turns.

    Raises:
        RuntimeError: If one of them does not start, or ends.
    """
    progress, environ = Console(stderr=True), dict(read_environment())
    teams: dict[int, Team] = {}
    us_per_token: dict[int, list[float]] = {}
    lengths: list[int] = arguments.row_tokens
    try:
        for row_tokens in lengths:
            spec = BenchSpec(
                ffn_hidden_size=4 * arguments.hidden,
                hidden_size=arguments.hidden,
                num_layers=arguments.layers,
                num_rows=1,
                row_tokens=row_tokens,
                document_tokens=tuple(arguments.documents),
                num_threads=arguments.threads,
            )
            teams[row_tokens], us_per_token[row_tokens] = Team.start(OWN, spec, sys.executable, environ), []
        for index in range(arguments.warmup + arguments.rounds):
            shift = index % len(lengths)
            for row_tokens in lengths[shift:] + lengths[:shift]:
                seconds = take_turn(teams[row_tokens], -(-TURN_TOKENS // row_tokens))
                if index >= arguments.warmup:
                    us_per_token[row_tokens].append(1e6 * seconds / row_tokens)
            progress.print(f"  round {index + 1}/{arguments.warmup + arguments.rounds}", highlight=False)
    finally:
        for team in teams.values():
            team.stop()
    rows = tuple(
        (statistics.median(times), min(times), max(times), teams[row_tokens].peak_bytes / 2**20)
        for row_tokens, times in us_per_token.items()
    )
    shortest, longest = arguments.documents
    name = f"training step, {arguments.layers} layers hidden {arguments.hidden}, documents of {shortest}-{longest}"
    figures = {"max / min over rows": max_to_min([row[0] for row in rows])}
    return [
        Sweep(
            name,
            "row tokens",
            ("us per token", "min", "max", "peak MiB"),
            tuple(lengths),
            rows,
            figures,
            {"max / min over rows": arguments.step_at_most},
        )
    ]


def take_turn(team: Team, num_steps: int) -> float:
    """Take some steps, and return the mean of their seconds.

    Raises:
        RuntimeError: With what the process said last, if it did not.
    """
    for _ in range(num_steps):
        if not team.absent:
            team.step(is_counted=True)
    if team.absent:
        raise RuntimeError(f"a training process ended: {team.absent}")
    return statistics.mean(team.times_s[-num_steps:])


SWEEPS: dict[str, Callable[[argparse.Namespace], list[Sweep]]] = {
    "grouping": measure_grouping,
    "layer": measure_layer,
    "step": measure_step,
}


def moe_layer(word: str) -> tuple[int, int, int]:
    """Read ``E:K:F``.

    Raises:
        argparse.ArgumentTypeError: If it is something else.
    """
    parts = word.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{word!r}: expected EXPERTS:TOPK:FFN, as 64:4:64")
    num_experts, top_k, ffn_size = map(int, parts)
    if not 1 <= top_k <= num_experts or ffn_size < 1:
        raise argparse.ArgumentTypeError(f"{word!r}: expected 1 <= TOPK <= EXPERTS and FFN of at least 1")
    return num_experts, top_k, ffn_size


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ConfigError: On numbers that make no measurement, or files that cannot be written.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_sizes(parser)
    for name, meaning in (
        ("exponent", "fitted exponent of grouping in tokens"),
        ("experts", "grouping's largest / smallest time over experts"),
        ("layer", "time of each MoE layer / its products by torch.mm"),
        ("step", "largest / smallest time per token over rows"),
    ):
        parser.add_argument(f"--{name}-at-most", type=float, metavar="X", help=f"{meaning}; unset: no condition")
    parser.add_argument("--json", metavar="F", help="write all figures there")
    parser.add_argument("--markdown", metavar="F", help="write the tables there")
    parser.add_argument("--png", metavar="F", help="draw the tables there (matplotlib); its ending chooses the format")
    arguments = parser.parse_args(words)
    for name in ("repeats", "rounds", "threads", "hidden", "layers", "layer_tokens"):
        require(name, getattr(arguments, name), 1)
    require("warmup", arguments.warmup, 0)
    for name, least in (("grouping_tokens", 1), ("grouping_experts", 1), ("row_tokens", 2)):
        values = getattr(arguments, name)
        require(name, min(values), least)
        if len(set(values)) < 2 or len(set(values)) < len(values):
            raise ConfigError(flag(name), values, "shows no dependence", "give at least two different numbers")
    shortest, longest = arguments.documents
    if not 1 <= shortest <= longest:
        raise ConfigError("--documents", arguments.documents, "is no range", "give the shortest, then the longest")
    for name in ("json", "markdown", "png"):
        if path := getattr(arguments, name):
            check_writable_file(path, flag(name))
    return arguments


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add what is measured, and how often."""
    parser.add_argument("--only", nargs="+", choices=tuple(SWEEPS), default=list(SWEEPS), help="which (default all)")
    lists = (
        ("grouping-tokens", [2**power for power in range(10, 17)], "tokens to group"),
        ("grouping-experts", [2**power for power in range(3, 10)], "experts to group by"),
        ("row-tokens", [2**power for power in range(10, 15)], "lengths of a training step's row"),
    )
    for name, default, meaning in lists:
        told = f"{meaning} (default {default[0]} to {default[-1]})"
        parser.add_argument(f"--{name}", type=int, nargs="+", metavar="N", default=default, help=told)
    layers = [(8, 2, 1024), (64, 4, 64), (128, 8, 64)]
    parser.add_argument(
        "--moe-layers",
        type=moe_layer,
        nargs="+",
        metavar="E:K:F",
        default=layers,
        help="experts, choices per token and width of the layers (default 8:2:1024 64:4:64 128:8:64)",
    )
    parser.add_argument(
        "--documents",
        type=int,
        nargs=2,
        metavar="N",
        default=list(SHORT_DOCUMENTS),
        help=f"shortest and longest document of a row (default {SHORT_DOCUMENTS[0]} {SHORT_DOCUMENTS[1]})",
    )
    for name, default, meaning in (
        ("layer-tokens", 2048, "tokens of the MoE layer"),
        ("hidden", 256, "width of the layer and of the model"),
        ("layers", 4, "blocks of the model"),
        ("repeats", 15, "rounds of grouping and layer"),
        ("rounds", 3, "counted rounds of steps"),
        ("warmup", 1, "rounds of steps before them"),
        ("threads", 2, "of each process"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} (default {default})")


def flag(name: str) -> str:
    """An attribute's flag."""
    return "--" + name.replace("_", "-")


def require(name: str, value: int, least: int) -> None:
    """Refuse a number.

    Raises:
        ConfigError: If it is below ``least``.
    """
    if value < least:
        raise ConfigError(flag(name), value, "is too few", f"use at least {least}")


def run() -> int:
    """Measure, show, write, judge."""
    arguments = parse_arguments()
    pyplot = load_pyplot("--png", arguments.png) if arguments.png else None
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    sweeps: list[Sweep] = []
    console = Console(width=120)
    title = f"fp32, {arguments.threads} threads on {cpu_count()} CPU cores, torch {torch.__version__}"
    for name in arguments.only:
        for sweep in SWEEPS[name](arguments):
            print_sweep(sweep, console)
            sweeps.append(sweep)
    if arguments.json:
        write_json(arguments.json, {"title": title, "sweeps": [asdict(sweep) for sweep in sweeps]})
    if arguments.markdown:
        write_text(arguments.markdown, markdown(sweeps, title))
    if pyplot is not None:
        draw(pyplot, sweeps, title, arguments.png)
    failures = [line for sweep in sweeps for line in sweep.judge()]
    for line in failures:
        print(line)
    return 1 if failures else 0


def main() -> int:
    """Entry point with one-line errors."""
    return exit_code_of(run, RuntimeError)


if __name__ == "__main__":
    raise SystemExit(main())
