#!/usr/bin/env python3
"""Copies of offloaded activations beside all-reduces of gradients: how much one slows the other, and what bounds do.

Several ranks on this machine each run a stack of blocks whose inputs go to disk and come back in backward, while the
gradients of blocks that are through are summed over the ranks, as data parallelism does it. Variants take turns, step
by step in rotating order: no offload (the all-reduces alone), no all-reduce (the copies alone), both without bounds,
one copy at a time (--offload-max-inflight 1), and a bounded rate (--offload-max-mb-per-s). It measures the CPU with
gloo and the disk tier; on a GPU copies and collectives share other roads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_glue.activation import ActivationManager, ActivationPlan
from megatron_glue.parallel.local_ranks import LocalGroup, run_on_ranks
from megatron_glue.types import ForwardContext, PackedSequence

MIB = 1 << 20
OFFLOAD = {"offload": True, "double_buffer": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "all-reduce alone": {},
    "copies alone": OFFLOAD,
    "both": OFFLOAD,
    "both, one copy at a time": {**OFFLOAD, "max_inflight": 1},
    "both, bounded rate": OFFLOAD,
}
FIGURES = ("step_ms", "copy_ms", "reload_wait_ms")
EXAMPLE = """example:
  python tools/bench/copy_contention.py --ranks 2 --layers 12 --tokens 4096 --dim 512 --mb-per-s 100

Per step, medians over steps, of the slowest rank:
copy         time that copies back took
wait         time that backward stood still for them
all-reduce   time during which at least one all-reduce was under way on all ranks"""


class Block(nn.Module):
    """x + W2 gelu(W1 norm(x)), hidden size D."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, dim)
        self.down = nn.Linear(dim, dim)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """Run the block on [T, D]."""
        return x_TD + self.down(F.gelu(self.up(self.norm(x_TD))))


class Reducer:
    """Sums each gradient over ranks as soon as it is there, and notes when.

    Args:
        blocks: Whose gradients.
    """

    def __init__(self, blocks: nn.Module) -> None:
        self.is_on = True
        self._works: list[Any] = []
        self._spans: list[list[float]] = []
        for param in blocks.parameters():
            param.register_post_accumulate_grad_hook(self._start)

    def _start(self, param: Tensor) -> None:
        if not self.is_on:
            return
        span = [time.perf_counter(), 0.0]
        work = dist.all_reduce(param.grad, async_op=True)
        assert work is not None

        def note(_: Any) -> None:
            span[1] = time.perf_counter()

        self._spans.append(span)
        self._works.append(work.get_future().then(note))

    def finish(self) -> list[list[float]]:
        """Wait for all; return the begin and end of each, in seconds of a clock that all ranks on a machine share."""
        for work in self._works:
            work.wait()
        spans, self._spans = self._spans, []
        self._works.clear()
        return spans


def busy_ms(spans_of_ranks: Sequence[list[list[float]]]) -> float:
    """Time during which at least one all-reduce was under way on all ranks: waiting for a late rank does not count.

    Args:
        spans_of_ranks: For each rank the begin and end of each all-reduce, in the order in which they were started.
    """
    spans = [
        (max(begin for begin, _ in of_ranks), max(end for _, end in of_ranks))
        for of_ranks in zip(*spans_of_ranks, strict=True)
    ]
    busy_s, reached_s = 0.0, 0.0
    for begin, end in sorted(spans):
        busy_s += max(0.0, end - max(begin, reached_s))
        reached_s = max(reached_s, end)
    return 1e3 * busy_s


def measure_on_rank(rank: int, world_size: int, options: dict[str, Any], folder: str) -> dict[str, list[Any]]:
    """Let the variants take turns.

    Args:
        rank: This rank.
        world_size: All ranks.
        options: The tool's arguments.
        folder: Of the disk tier.

    Returns:
        By variant, for each measured step the figures in the order of ``FIGURES``, and the spans of its all-reduces.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(options["dim"]) for _ in range(options["layers"]))
    reducer = Reducer(blocks)
    x_TD = torch.randn(options["tokens"], options["dim"])
    managers = {
        name: ActivationManager(
            ActivationPlan(
                recompute=True,
                offload_dir=Path(folder) / f"{rank}",
                max_bytes_per_s=options["mb_per_s"] * MIB if "rate" in name else 0.0,
                **fields,
            ),
            "cpu",
        )
        for name, fields in VARIANTS.items()
    }
    results: dict[str, list[Any]] = {name: [] for name in VARIANTS}
    names = list(VARIANTS)
    for step in range(options["steps"] + 1):
        turn = step % len(names)
        for name in names[turn:] + names[:turn]:
            reducer.is_on = name != "copies alone"
            figures = measure_step(managers[name], blocks, x_TD, reducer)
            if step:  # the first makes buffers, files and connections
                results[name].append(figures)
    for manager in managers.values():
        manager.close()
    return results


def measure_step(manager: ActivationManager, blocks: nn.ModuleList, x_TD: Tensor, reducer: Reducer) -> list[Any]:
    """One forward and backward of the stack, all ranks together: figures, and spans of all-reduces."""
    context = ForwardContext(PackedSequence.from_lengths([x_TD.shape[0]]))
    blocks.zero_grad()
    dist.barrier()
    begin_s = time.perf_counter()
    manager.begin_step()
    h_TD = x_TD.clone().requires_grad_()
    for position, block in enumerate(blocks):
        h_TD = manager.run_block(block, h_TD, context, position=position, is_last=position == len(blocks) - 1)
    manager.end_forward()
    h_TD.square().mean().backward()
    manager.reset()
    spans = reducer.finish()
    step_ms = 1e3 * (time.perf_counter() - begin_s)
    times = manager.step_times(last_steps=1)
    copy_ms, wait_ms = (times[0].copy_ms, times[0].reload_wait_ms) if times else (0.0, 0.0)
    return [step_ms, copy_ms, wait_ms, spans]


def summarise(ranks: Sequence[dict[str, list[Any]]]) -> dict[str, dict[str, float]]:
    """Medians over steps of the slowest rank, by variant and figure."""
    figures: dict[str, dict[str, float]] = {}
    for name in VARIANTS:
        steps = list(zip(*(rank[name] for rank in ranks), strict=True))
        figures[name] = {
            figure: statistics.median(max(of_rank[i] for of_rank in step) for step in steps)
            for i, figure in enumerate(FIGURES)
        }
        figures[name]["all_reduce_ms"] = statistics.median(busy_ms([of_rank[-1] for of_rank in step]) for step in steps)
    return figures


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name, default, text in (
        ("ranks", 2, "processes"),
        ("layers", 12, "blocks"),
        ("tokens", 4096, "tokens of a micro-batch"),
        ("dim", 512, "hidden size"),
        ("steps", 5, "measured steps of each variant"),
        ("mb-per-s", 100, "bound of the last variant, MiB/s each way"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    parser.add_argument("--folder", help="of the disk tier; unset: a temporary one")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    for name in ("ranks", "layers", "tokens", "dim", "steps", "mb_per_s"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: use at least 1")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        group = LocalGroup(arguments.ranks, timeout_s=600.0)
        ranks = run_on_ranks(measure_on_rank, group, vars(arguments), folder)
    figures = summarise(ranks)
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return 0
    input_mib, grad_mib = 4 * arguments.tokens * arguments.dim / MIB, 8 * arguments.dim**2 / MIB
    sizes = f"inputs of {input_mib:.1f} MiB, {grad_mib:.1f} MiB of gradients each"
    print(f"{arguments.ranks} ranks, {arguments.layers} blocks, {sizes}")
    print(f"{'variant':<26}{'step ms':>10}{'copy ms':>10}{'wait ms':>10}{'all-reduce ms':>15}")
    for name, row in figures.items():
        print(
            f"{name:<26}{row['step_ms']:>10.0f}{row['copy_ms']:>10.0f}{row['reload_wait_ms']:>10.1f}"
            f"{row['all_reduce_ms']:>15.1f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
