"""Makes the observation that ``gate.py`` compares: a short run from a fixed seed, and samples of its layers' outputs.

Shape suffixes: T tokens, D model.
"""

from __future__ import annotations

import math
import os
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from megatron_glue.activation.device_api import device_name
from megatron_glue.backends.processor import processor_facts
from megatron_glue.config.sections import RunConfig
from megatron_glue.parallel.collectives import max_over_ranks
from megatron_glue.proofs.ablation import heldout_loss
from megatron_glue.proofs.gate import DATA_CONTENT
from megatron_glue.training.metrics import StepTimer
from megatron_glue.training.session import Session
from megatron_glue.training.step import train_settled_step
from megatron_glue.training.summary import peak_memory_bytes

NUM_SAMPLED_LAYERS, NUM_SAMPLED_TOKENS, NUM_SAMPLED_CHANNELS = 3, 8, 16
COMPARED_SECTIONS = ("model", "moe", "parallel", "data", "optimizer")
COMPARED_TRAINING_FIELDS = ("micro_batch_size", "global_batch_size", "seed", "precision", "eval_iters")
NOT_COMPARED = {"data.data_path", "parallel.distributed_timeout_minutes"}
"""Where the data lies says nothing: its content is compared."""


def observe_run(session: Session, warmup: int, steps: int) -> dict[str, Any]:
    """Train and sample.

    Args:
        session: At its first step.
        warmup: Steps whose time is left out.
        steps: Steps behind them.

    Returns:
        Plain values; the same on all ranks but for layers of other pipeline stages.
    """
    outputs = {f"{name}, before training": values for name, values in sample_outputs(session).items()}
    timer, times_s = StepTimer(session.device), []
    for _ in range(warmup + steps):
        timer.start()
        result = train_settled_step(session)
        times_s.append(timer.stop(wait_for_device=True))
        session.metrics.add(result, times_s[-1])
    session.metrics.flush(session.host_reader, session.mesh.world_group)
    outputs |= {f"{name}, after training": values for name, values in sample_outputs(session).items()}
    tokens = statistics.mean(session.metrics.step_tokens[warmup:])
    return {
        "run": described_run(session, warmup + steps),
        "losses": session.metrics.losses,
        "grad_norms": session.metrics.grad_norms,
        "heldout": [heldout_loss(session)],
        "outputs": outputs,
        "tokens_per_second": tokens / statistics.median(times_s[warmup:]),
        "step_ms": [1e3 * seconds for seconds in times_s[warmup:]],
        "peak_memory_bytes": max_over_ranks(peak_memory_bytes(session.device), session.mesh.world_group),
        "machine": machine(session.device),
        "made_with": {
            "torch": str(torch.__version__),
            "device": _device_name(session.device),
            "dtype": str(session.built.precision.compute_dtype).removeprefix("torch."),
        },
    }


def first_not_finite(observed: dict[str, Any]) -> str:
    """Name the first figure that is not finite: what is compared with it always fails. Empty if all are."""
    for key in ("losses", "grad_norms", "heldout"):
        for step, value in enumerate(observed[key], start=1):
            if not math.isfinite(value):
                return f"{key.replace('_', ' ')}, step {step}: {value}"
    return next((name for name, values in observed["outputs"].items() if not math.isfinite(sum(values))), "")


def machine(device: torch.device) -> dict[str, Any]:
    """What throughput and memory depend on beside the run: those of another kind of machine say nothing."""
    return {
        "device": device_name(device),
        "processor": processor_facts().get("model name", "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
    }


def described_run(session: Session, num_steps: int) -> dict[str, Any]:
    """What must be equal for two observations to be comparable. Kernels and switches may differ: they are on trial."""
    data = session.data
    return {
        **compared_settings(session.config),
        DATA_CONTENT: f"{data.train.fingerprint[:12]}+{data.heldout.fingerprint[:12]}",
        "steps": num_steps,
        "ranks": session.mesh.world_size,
    }


def compared_settings(config: RunConfig) -> dict[str, Any]:
    """The settings among :func:`described_run`, as section.field."""
    values = config.model_dump(mode="json")
    sections = {f"{name}.{key}": value for name in COMPARED_SECTIONS for key, value in values[name].items()}
    training = {f"training.{key}": values["training"][key] for key in COMPARED_TRAINING_FIELDS}
    return {key: value for key, value in {**sections, **training}.items() if key not in NOT_COMPARED}


def sample_outputs(session: Session) -> dict[str, list[float]]:
    """Outputs of the first, a middle and the last block of this rank, at fixed tokens and channels of held-out text.

    Args:
        session: At any step; no counter moves.

    Returns:
        Values by the layer's name, token by token.
    """
    blocks = {index: block for part in session.built.parts for index, block in part.blocks.items()}
    chosen = _spread(sorted(blocks, key=int), NUM_SAMPLED_LAYERS)
    samples: dict[str, Tensor] = {}
    handles = [blocks[index].register_forward_hook(_sampler(f"layer {index}", samples)) for index in chosen]
    try:
        heldout_loss(session)
    finally:
        for handle in handles:
            handle.remove()
    with session.uncounted():
        return {name: session.host_reader.read(values.flatten().float()) for name, values in samples.items()}


def _sampler(name: str, samples: dict[str, Tensor]) -> Any:
    def keep(_module: nn.Module, _inputs: Any, out_TD: Tensor) -> None:
        # Only of the first batch.
        if name not in samples:
            rows = _spread(range(out_TD.shape[0]), NUM_SAMPLED_TOKENS)
            channels = _spread(range(out_TD.shape[1]), NUM_SAMPLED_CHANNELS)
            samples[name] = torch.stack([out_TD[row, channels] for row in rows]).detach().clone()

    return keep


def _spread(items: Any, number: int) -> list[Any]:
    """At most this many items, the first, the last and evenly between them."""
    if len(items) <= number:
        return list(items)
    return [items[index * (len(items) - 1) // (number - 1)] for index in range(number)]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
