#!/usr/bin/env python3
"""Time the project's operators, each against its oracle and against the common implementation of the same thing.

    grouping       one-pass grouping            | one mask per expert; sort + bincount
    dispatch       permute and unpermute        | index_select, weigh, index_add
    metadata       one build for all layers     | boundaries read from the device tensor in every layer
    attention      batched segments             | a dense mask over the pack; one call per document
    cross-entropy  chunks of logits             | F.cross_entropy on all logits
    optimizer      fused AdamW with its guard   | torch.optim.AdamW foreach; its loop over parameters

Differentiable ones run forward and backward. ``difference`` is the largest difference of outputs and gradients to an
oracle in fp64 (of integers: in the integers themselves), relative to the oracle's largest value. The ways of a row take
turns in rotating order; times are medians, min-max their range, and the ratio is the median over rounds of another
way's time / this project's. Exit code 1 if a difference is beyond --tolerance.

    python tools/bench/micro.py
    python tools/bench/micro.py --only grouping dispatch --tokens 4096 --experts 64 --json micro.json
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from turns import take_turns  # pyright: ignore[reportMissingImports]

from megatron_glue.backends.attention_dense import dense_attention
from megatron_glue.backends.attention_metadata import METADATA_BUILDERS
from megatron_glue.backends.attention_segments import segments_attention
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import OptimizerConfig
from megatron_glue.layers.packed_metadata import PackedMetadataCache
from megatron_glue.ops.cross_entropy import LossChunks, linear_cross_entropy
from megatron_glue.ops.grouping import group_tokens
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.ops.permute import permute_rows, unpermute_rows
from megatron_glue.training.exit_codes import exit_code_of
from megatron_glue.training.optimizer import build_optimizer
from megatron_glue.training.summary import check_writable_file, write_json
from megatron_glue.types import PackedSequence

Way = Callable[[], Sequence[Tensor]]
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Case:
    """One operator.

    Attributes:
        sizes: For people.
        ways: By name, this project's first; each returns what is compared.
        oracle: What they must return.
    """

    sizes: str
    ways: dict[str, Way]
    oracle: Sequence[Tensor]


@dataclass(frozen=True)
class Row:
    """One way, measured.

    Attributes:
        operator: Name of the case.
        sizes: Its sizes.
        way: Name of the way.
        median_ms: Median time.
        min_ms: Shortest.
        max_ms: Longest.
        ratio: Median over rounds of this way's time / the project's.
        difference: Largest relative difference to the oracle.
    """

    operator: str
    sizes: str
    way: str
    median_ms: float
    min_ms: float
    max_ms: float
    ratio: float
    difference: float


def grouping_case(sizes: argparse.Namespace, device: torch.device) -> Case:
    """Order of (token, choice) pairs by expert, and counts."""
    ids_TK = draw_experts(sizes, device)
    num_experts = sizes.experts

    def one_pass() -> Sequence[Tensor]:
        groups = group_tokens(ids_TK, num_experts)
        return groups.order_N, groups.counts_E

    def masks() -> Sequence[Tensor]:
        parts = [torch.where(ids_TK.view(-1) == expert)[0] for expert in range(num_experts)]
        return torch.cat(parts), torch.tensor([part.shape[0] for part in parts], device=device)

    def sort_and_bincount() -> Sequence[Tensor]:
        flat_N = ids_TK.view(-1)
        return torch.argsort(flat_N, stable=True), torch.bincount(flat_N, minlength=num_experts)

    ways: dict[str, Way] = {"one pass": one_pass, "mask per expert": masks, "sort + bincount": sort_and_bincount}
    return Case(f"T{sizes.tokens} K{sizes.top_k} E{num_experts}", ways, masks())


def dispatch_case(sizes: argparse.Namespace, device: torch.device) -> Case:
    """Rows to expert order and back, weighed."""
    ids_TK = draw_experts(sizes, device)
    groups = group_tokens(ids_TK, sizes.experts)
    x_TD = torch.randn(sizes.tokens, sizes.hidden, device=device)
    weights_TK = torch.rand(sizes.tokens, sizes.top_k, device=device)
    grad_TD = torch.randn_like(x_TD)
    token_N = groups.order_N // sizes.top_k

    def ours(x_TD: Tensor, weights_TK: Tensor) -> Tensor:
        return unpermute_rows(permute_rows(x_TD, groups, has_sentinels=False), groups, weights_TK, has_sentinels=False)

    def common(x_TD: Tensor, weights_TK: Tensor) -> Tensor:
        rows_ND = x_TD.index_select(0, token_N) * weights_TK.view(-1).index_select(0, groups.order_N)[:, None]
        return torch.zeros_like(x_TD).index_add(0, token_N, rows_ND)

    inputs = (x_TD, weights_TK)
    ways: dict[str, Way] = {
        "permute / unpermute": lambda: both_passes(ours, inputs, grad_TD),
        "index_select / index_add": lambda: both_passes(common, inputs, grad_TD),
    }
    return Case(f"T{sizes.tokens} K{sizes.top_k} D{sizes.hidden}", ways, in_fp64(common, inputs, grad_TD))


def metadata_case(sizes: argparse.Namespace, device: torch.device) -> Case:
    """Cumulative lengths and positions in the pack, for all layers of one micro-batch."""
    lengths = draw_lengths(sizes)
    layout = PackedSequence.from_lengths(lengths)
    segment_ids_T = layout.segment_ids_T.to(device)

    def cached() -> Sequence[Tensor]:
        # A new sequence, as every micro-batch brings one: entries live on it.
        sequence = PackedSequence.from_lengths(lengths).to(device)
        cache = PackedMetadataCache("varlen", True, HostReader())
        return [cache.for_sequence(sequence).cu_seqlens for _ in range(sizes.layers)][-1:]

    def in_every_layer() -> Sequence[Tensor]:
        built = []
        for _ in range(sizes.layers):
            counts = torch.unique_consecutive(segment_ids_T, return_counts=True)[1]
            built.append(F.pad(counts.cumsum(0), (1, 0)).to(torch.int32))
            int(counts.max())
        return built[-1:]

    oracle = [torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)]
    ways: dict[str, Way] = {"once, shared": cached, "in every layer": in_every_layer}
    return Case(f"T{sizes.tokens} documents {len(lengths)} L{sizes.layers}", ways, oracle)


def attention_case(sizes: argparse.Namespace, device: torch.device) -> Case:
    """Causal attention inside each document of a pack."""
    lengths, head_dim = draw_lengths(sizes), sizes.hidden // sizes.heads
    inputs = tuple(torch.randn(sizes.tokens, sizes.heads, head_dim, device=device) for _ in range(3))
    grad_THC = torch.randn_like(inputs[0])
    segments, dense = (METADATA_BUILDERS[layout](lengths, 0, device, 0) for layout in ("segments", "dense"))

    def attend_with(kernel: Callable[..., Tensor], metadata: object) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda q, k, v: kernel(q, k, v, metadata, window=0, scale=head_dim**-0.5, dropout=None)

    def by_document(q_THC: Tensor, k_THC: Tensor, v_THC: Tensor) -> Tensor:
        outs = []
        for q, k, v in zip(*(x.split(lengths) for x in (q_THC, k_THC, v_THC)), strict=True):
            heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
            outs.append(F.scaled_dot_product_attention(*heads_first, is_causal=True)[0].transpose(0, 1))
        return torch.cat(outs)

    ways: dict[str, Way] = {
        "segments": lambda: both_passes(attend_with(segments_attention, segments), inputs, grad_THC),
        "dense mask": lambda: both_passes(attend_with(dense_attention, dense), inputs, grad_THC),
        "call per document": lambda: both_passes(by_document, inputs, grad_THC),
    }
    sizes_text = f"T{sizes.tokens} documents {len(lengths)} H{sizes.heads} C{head_dim}"
    return Case(sizes_text, ways, in_fp64(by_document, inputs, grad_THC))


def cross_entropy_case(sizes: argparse.Namespace, device: torch.device) -> Case:
    """Output layer and loss, summed over tokens."""
    x_TD = torch.randn(sizes.tokens, sizes.hidden, device=device)
    weight_VD = 0.02 * torch.randn(sizes.vocab, sizes.hidden, device=device)
    labels_T = torch.randint(sizes.vocab, (sizes.tokens,), device=device)

    def chunked(x_TD: Tensor, weight_VD: Tensor) -> Tensor:
        return linear_cross_entropy(x_TD, weight_VD, labels_T, LossChunks(sizes.vocab, sizes.chunk_tokens))

    def whole(x_TD: Tensor, weight_VD: Tensor) -> Tensor:
        return F.cross_entropy(x_TD @ weight_VD.t(), labels_T, reduction="sum")

    inputs, one = (x_TD, weight_VD), torch.ones((), device=device)
    ways: dict[str, Way] = {
        f"chunks of {sizes.chunk_tokens}": lambda: both_passes(chunked, inputs, one),
        "all logits": lambda: both_passes(whole, inputs, one),
    }
    return Case(f"T{sizes.tokens} D{sizes.hidden} V{sizes.vocab}", ways, in_fp64(whole, inputs, one))


def optimizer_case(sizes: argparse.Namespace, device: torch.device) -> Case:
    """One AdamW step; what is compared are the weights after the first one."""
    start = [torch.randn(sizes.hidden, sizes.hidden, device=device) for _ in range(sizes.matrices)]
    grads = [torch.randn_like(weight) for weight in start]
    config = OptimizerConfig(weight_decay=0.1)

    def params_of(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
        params = [torch.nn.Parameter(weight.to(dtype, copy=True)) for weight in start]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(dtype)
        return params

    def torch_adamw(params: list[torch.nn.Parameter], *, foreach: bool) -> Callable[[], object]:
        settings = {"lr": LEARNING_RATE, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
        return torch.optim.AdamW(params, weight_decay=config.weight_decay, foreach=foreach, **settings).step

    def after(step: Callable[[], object], params: list[torch.nn.Parameter]) -> Way:
        def way() -> Sequence[Tensor]:
            step()
            return [param.detach() for param in params]

        return way

    ours = params_of()
    optimizer = build_optimizer([(str(i), param) for i, param in enumerate(ours)], config, "fused", device)
    norm = torch.ones((), device=device)
    foreach, loop, exact = params_of(), params_of(), params_of(torch.float64)
    ways = {
        "fused, guarded": after(lambda: optimizer.step(LEARNING_RATE, norm), ours),
        "torch foreach": after(torch_adamw(foreach, foreach=True), foreach),
        "torch loop": after(torch_adamw(loop, foreach=False), loop),
    }
    oracle = after(torch_adamw(exact, foreach=False), exact)()
    return Case(f"{sizes.matrices} x {sizes.hidden} x {sizes.hidden}", ways, oracle)


CASES: dict[str, Callable[[argparse.Namespace, torch.device], Case]] = {
    "grouping": grouping_case,
    "dispatch": dispatch_case,
    "metadata": metadata_case,
    "attention": attention_case,
    "cross-entropy": cross_entropy_case,
    "optimizer": optimizer_case,
}


def draw_experts(sizes: argparse.Namespace, device: torch.device) -> Tensor:
    """Draw K different experts per token, int64 [T, K]."""
    return torch.rand(sizes.tokens, sizes.experts).topk(sizes.top_k).indices.to(device).contiguous()


def draw_lengths(sizes: argparse.Namespace) -> list[int]:
    """Draw document lengths that fill a pack exactly."""
    cuts = torch.randperm(sizes.tokens - 1)[: sizes.documents - 1].add(1).sort().values
    edges = torch.cat((torch.tensor([0]), cuts, torch.tensor([sizes.tokens])))
    return edges.diff().tolist()


def both_passes(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
    """Output and the gradients of all inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def in_fp64(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
    """The same in double precision."""
    return both_passes(function, [tensor.double() for tensor in inputs], grad.double())


def largest_difference(found: Sequence[Tensor], oracle: Sequence[Tensor]) -> float:
    """Largest difference relative to the oracle's largest value; absolute for integers, infinite for a wrong shape."""
    largest = 0.0
    for own, exact in zip(found, oracle, strict=True):
        if own.shape != exact.shape:
            return float("inf")
        difference = (own.double() - exact.double()).abs().max().item()
        scale = exact.double().abs().max().item() if exact.is_floating_point() else 1.0
        relative = difference / scale if scale else difference
        # max() would step over a NaN.
        largest = float("inf") if math.isnan(relative) else max(largest, relative)
    return largest


def measure(name: str, case: Case, repeats: int, device: torch.device) -> list[Row]:
    """Check each way once, then let them take turns."""
    differences = {way: largest_difference(run(), case.oracle) for way, run in case.ways.items()}
    times_ms = take_turns(case.ways, repeats, device)
    own = next(iter(times_ms.values()))
    rows = []
    for way, times in times_ms.items():
        ratio = statistics.median(other / base for other, base in zip(times, own, strict=True))
        spread = statistics.median(times), min(times), max(times)
        rows.append(Row(name, case.sizes, way, *spread, ratio, differences[way]))
    return rows


def print_table(rows: Sequence[Row], title: str) -> None:
    """One line per way."""
    table = Table(title=title, title_justify="left")
    for column in ("operator", "way", "median ms", "min-max", "time / ours", "difference"):
        table.add_column(column, justify="left" if column in ("operator", "way") else "right", no_wrap=True)
    previous = ""
    for row in rows:
        if row.operator != previous:
            table.add_section()
            table.add_row(f"[bold]{row.operator}[/bold]", row.sizes)
            previous = row.operator
        spread = f"{row.min_ms:.3f}-{row.max_ms:.3f}"
        table.add_row("", row.way, f"{row.median_ms:.3f}", spread, f"{row.ratio:.2f}x", f"{row.difference:.1e}")
    Console(width=120).print(table)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=list(CASES), help="which (default all)")
    for name, default, meaning in (
        ("tokens", 1024, "T, tokens of a pack"),
        ("documents", 24, "documents in it"),
        ("hidden", 256, "D, width of the model"),
        ("heads", 4, "H, attention heads"),
        ("layers", 16, "L, layers that ask for metadata"),
        ("experts", 32, "E, experts"),
        ("top-k", 4, "K, experts per token"),
        ("vocab", 4096, "V, vocabulary"),
        ("chunk-tokens", 256, "tokens whose logits exist at once"),
        ("matrices", 24, "weights of D x D for the optimizer"),
        ("repeats", 15, "rounds"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} (default {default})")
    parser.add_argument("--tolerance", type=float, default=1e-4, metavar="X", help="largest difference (default 1e-4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--json", metavar="F", help="write all figures there")
    arguments = parser.parse_args()
    for name in ("tokens", "documents", "hidden", "heads", "layers", "experts", "top_k", "repeats", "matrices"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}", getattr(arguments, name), "is too few", "use at least 1")
    for name, limit in (("documents", "tokens"), ("top_k", "experts")):
        value, most = getattr(arguments, name), getattr(arguments, limit)
        if value > most:
            raise ConfigError(f"--{name.replace('_', '-')}", value, f"is more than --{limit}={most}", "lower it")
    if arguments.hidden % arguments.heads:
        raise ConfigError("--heads", arguments.heads, f"does not divide --hidden={arguments.hidden}", "use a divisor")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", "cuda", "torch sees no GPU here", "use --device cpu")
    if arguments.json:
        check_writable_file(arguments.json, "--json")
    return arguments


def run() -> int:
    """Measure, show, write, judge."""
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    rows: list[Row] = []
    for name in arguments.only:
        torch.manual_seed(0)
        rows += measure(name, CASES[name](arguments, device), arguments.repeats, device)
    title = (
        f"{arguments.repeats} rounds, fp32 on {device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print_table(rows, title)
    if arguments.json:
        write_json(arguments.json, {"title": title, "rows": [asdict(row) for row in rows]})
    wrong = [row for row in rows if not row.difference <= arguments.tolerance]
    for row in wrong:
        print(f"FAILED {row.operator}, {row.way}: differs by {row.difference:.1e}, allowed {arguments.tolerance:.1e}")
    return 1 if wrong else 0


def main() -> int:
    """Entry point with one-line errors."""
    return exit_code_of(run)


if __name__ == "__main__":
    raise SystemExit(main())
