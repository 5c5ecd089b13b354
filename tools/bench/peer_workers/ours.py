"""A worker with this project's own training step.

The variant lists flags of ``pretrain_moe.py`` beyond the model's sizes, for example ``--use-packed-cache``. Everything
but the documents is a real session: its model, engine, optimizer and ``train_settled_step``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from protocol import BenchSpec, draw_batches, serve

import megatron_glue
from megatron_glue.config.environment import RankEnvironment, read_environment
from megatron_glue.config.loading import resolve_config
from megatron_glue.config.validation import validate
from megatron_glue.parallel.host_allocator import keep_freed_memory
from megatron_glue.parallel.launch import init_distributed
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.proofs.given_batches import GivenData, session_over_batches
from megatron_glue.training.presets import GPT_DEFAULTS
from megatron_glue.training.session import Session
from megatron_glue.training.step import train_settled_step
from megatron_glue.types import IGNORE_LABEL, PackedBatch, PackedSequence


def build(spec: BenchSpec, rank: int) -> tuple[Callable[[], float], dict[str, Any]]:
    """Build the session. See :func:`protocol.serve`."""
    session = open_session(spec, rank)

    def step() -> float:
        # Each rank has its share of the mean over all.
        return float(train_settled_step(session).loss) * session.mesh.dp_size

    num_parameters = sum(parameter.numel() for parameter in session.engine.module.parameters())
    return step, {"version": f"megatron_glue {megatron_glue.__version__}", "num_parameters": num_parameters}


def open_session(spec: BenchSpec, rank: int) -> Session:
    """Build a session that trains on the benchmark's data.

    Args:
        spec: Sizes; its variant lists further flags.
        rank: This process.

    Returns:
        The session at iteration 0.
    """
    torch.set_num_threads(spec.num_threads)
    config = resolve_config(_flags(spec), {}, GPT_DEFAULTS, "tools/bench/peers.py").config
    validate(config, spec.world_size)
    device = torch.device("cpu")
    keep_freed_memory()  # as training/app.py does
    environment = RankEnvironment.from_mapping(read_environment())
    init_distributed(environment, timedelta(minutes=5), device)
    mesh = ParallelMesh.build(config.parallel, "cpu")
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    batches = (to_batch(*drawn) for drawn in draw_batches(spec, rank))
    return session_over_batches(config, mesh, device, GivenData(spec.vocab_size, batches), folder)


def to_batch(ids_BS: Any, lengths: list[list[int]]) -> PackedBatch:
    """All rows as one micro-batch; the label of a document's last token is ignored."""
    flat = [length for row in lengths for length in row]
    ids_T = torch.from_numpy(ids_BS.reshape(-1))
    labels_T = torch.cat((ids_T[1:], ids_T.new_full((1,), IGNORE_LABEL)))
    labels_T[torch.tensor(flat).cumsum(0) - 1] = IGNORE_LABEL
    return PackedBatch(ids_T, labels_T, PackedSequence.from_lengths(flat), len(ids_T) - len(flat))


def _flags(spec: BenchSpec) -> list[str]:
    flags = {
        "--num-layers": spec.num_layers,
        "--hidden-size": spec.hidden_size,
        "--num-attention-heads": spec.num_heads,
        "--ffn-hidden-size": spec.ffn_hidden_size,
        "--seq-length": spec.row_tokens,
        "--micro-batch-size": spec.num_rows,
        "--global-batch-size": spec.num_rows * spec.world_size,
        "--clip-grad": 0.0,
        "--lr-warmup-iters": 0,
        "--lr-decay-style": "constant",
    }
    if spec.num_experts:
        flags |= {
            "--num-experts": spec.num_experts,
            "--moe-router-topk": spec.top_k,
            "--moe-ffn-hidden-size": spec.ffn_hidden_size,
            "--moe-z-loss-coeff": 0.0,
            "--expert-model-parallel-size": spec.world_size,
        }
    words = [word for flag, value in flags.items() for word in (flag, str(value))]
    return [*words, "--untie-embeddings-and-output-weights", *spec.variant.split()]


if __name__ == "__main__":
    serve(build)
