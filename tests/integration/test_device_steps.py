"""Whole steps on the device: nothing waits for it, and offload through two buffers changes no gradient.

On a CPU the same code runs over the disk tier, where there is no debug mode to say what would have waited (the sync
audit does); on a GPU the tier is pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_glue.backends.grouped_mm import reads_offsets
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.step import accumulate_gradients, train_step
from tests.support.cases import small_config, write_corpus
from tests.support.tolerances import assert_close

WARMUP_STEPS = 3
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
ALL_THREE = {"enable_metadata_cache": True, "enable_double_buffer": True, "enable_grouped_index": True}
# Heads as the kernels of a GPU want them.
SHAPE = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4}


@contextmanager
def waiting_is_an_error(device: str) -> Iterator[None]:
    """Let torch raise at the first operation that makes the host wait for a GPU, in whichever thread."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_corpus(tmp_path_factory.mktemp("steps") / "corpus.jsonl"))


def build(corpus: str, device: str, moe: dict[str, Any], **training: Any) -> Session:
    config = small_config(corpus, model=SHAPE, moe=moe, training={"device": device, "global_batch_size": 4, **training})
    return build_session(config, ParallelMesh(), torch.device(device), Path(corpus).parent / "offload")


@DEVICES
@pytest.mark.parametrize("num_experts", [0, 8])
def test_f25_a_step_without_expert_parallelism_waits_for_nothing(corpus: str, device: str, num_experts: int) -> None:
    """In steady state: forward, recompute from offloaded inputs, backward, clipping and update."""
    if num_experts and device == "cuda" and reads_offsets(torch.device(device), torch.bfloat16):
        pytest.skip("needs a GPU on which grouped_mm reads nothing")
    precision = "bf16" if device == "cuda" else "fp32"
    session = build(corpus, device, {"num_experts": num_experts}, precision=precision, accelerator=ALL_THREE)
    try:
        for _ in range(WARMUP_STEPS):
            train_step(session)
        reads = session.num_step_host_reads
        with waiting_is_an_error(device):
            result = train_step(session)
        assert session.num_step_host_reads == reads == 0
        assert torch.isfinite(result.loss)
        stats = session.built.activation.stats()
        num_passes = 4 * (WARMUP_STEPS + 1)
        assert stats.num_reloads == stats.num_offloads == (SHAPE["num_layers"] - 1) * num_passes
        assert stats.num_residents == num_passes, "the last block's input stays"
    finally:
        session.close()


def gradients(session: Session) -> dict[str, Tensor]:
    """Of the second step's micro-batches, at the initial weights."""
    for _ in range(2):
        session.engine.reset()
        accumulate_gradients(session)
    return {name: param.grad.clone() for name, param in session.engine.module.named_parameters()}


@DEVICES
@pytest.mark.parametrize("num_experts", [0, 4])
def test_offload_through_two_buffers_changes_no_gradient(corpus: str, device: str, num_experts: int) -> None:
    results, tiers = [], []
    for accelerator in ({}, {"enable_double_buffer": True}):
        session = build(corpus, device, {"num_experts": num_experts}, precision="fp32", accelerator=accelerator)
        try:
            results.append(gradients(session))
            tiers.append(session.built.activation.describe())
        finally:
            session.close()
    assert "two reload buffers" not in tiers[0]
    assert "two reload buffers" in tiers[1]
    assert ("pinned host memory" in tiers[1]) == (device == "cuda")
    assert results[0].keys() == results[1].keys()
    for name, expected in results[0].items():
        # Atomic additions of a GPU have no fixed order.
        if device == "cuda":
            assert_close(results[1][name], expected, what=name)
        else:
            assert torch.equal(results[1][name], expected), name
