"""A run that meets a fault ends on all ranks, with one line that says which, and no traceback."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_glue.layers.attention import PackedAttention
from tests.support.cases import write_corpus
from tests.support.job import SMALL_FLAGS, RankEnd, run_job

FLAGS = [
    *SMALL_FLAGS,
    *("--num-layers", "2", "--num-experts", "0", "--global-batch-size", "4", "--train-iters", "6"),
    *("--save-interval", "2", "--save", "run"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus.jsonl")
    return tmp_path


def assert_one_line(end: RankEnd, *parts: str) -> None:
    assert end.code == 1, end
    (line,) = end.error_lines
    for part in parts:
        assert part in line, line
    assert "Traceback (most recent call last)" not in end.err


def after_attention(number: int, act: Any) -> None:
    """Put something behind the forward of attention from one call on, counted from 1."""
    real, calls = PackedAttention.forward, iter(range(1, 10000))

    @functools.wraps(real)
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        output = real(*args, **kwargs)
        return act(output) if next(calls) >= number else output

    PackedAttention.forward = forward


def nan_on(victim: int, rank: int) -> None:
    if rank == victim:
        after_attention(9, lambda output: output * torch.nan)


def test_nan_on_one_rank_ends_the_run_on_all_after_its_limit(folder: Path) -> None:
    ends = run_job([*FLAGS, "--max-nonfinite-steps", "2"], folder, 2, functools.partial(nan_on, 1))
    for end in ends:
        assert_one_line(end, "last 2 steps (to iteration 4)", "attention (PackedAttention) on rank 1")
    assert "warning: loss or gradient of iteration 3 is not finite: skipped on all ranks" in ends[0].out


def allocate_everything(victim: int, rank: int) -> None:
    if rank == victim:
        after_attention(9, lambda output: output + torch.empty(2**46).sum())


def test_memory_that_runs_out_is_one_line_with_a_table_and_a_flag(folder: Path) -> None:
    ends = run_job(FLAGS, folder, 2, functools.partial(allocate_everything, 1))
    assert_one_line(
        ends[1],
        "error: [rank 1] out of memory on cpu in forward and backward of iteration 3: DefaultCPUAllocator: can't",
        *("; weights ", " MiB, gradients ", " MiB, moments ", " MiB, activations and the rest ", "; this machine has "),
        "most is activations and the rest: use --recompute-granularity full, or --double-buffer-ckpt, or a smaller",
    )
    assert_one_line(ends[0], "stopped because another rank failed")


class _NanInBackward(torch.autograd.Function):
    """An operator with a fault of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> torch.Tensor:
        return grads[0] * torch.nan


def nan_in_backward(_rank: int) -> None:
    after_attention(1, _NanInBackward.apply)


def test_detect_anomaly_names_the_operator(folder: Path) -> None:
    (end,) = run_job([*FLAGS, "--detect-anomaly"], folder, 1, nan_in_backward)
    assert_one_line(end, "--detect-anomaly", "_NanInBackwardBackward", "returned nan values")
