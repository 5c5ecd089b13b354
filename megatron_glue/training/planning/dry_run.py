"""What ``--dry-run`` prints: the layout of the ranks, the memory that each needs, and what would start.

Nothing is started: no process group, no device is touched, no file is written, no data is read. What only the machine
itself can answer (free GPUs, kernels, the content of data) is left to the start; the page says so where it matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console

from megatron_glue.backends.registry import resolve
from megatron_glue.config.fields import flag_of
from megatron_glue.config.loading import DryRun, ResolvedConfig, describe
from megatron_glue.config.sections import RunConfig
from megatron_glue.config.stage_plan import StagePlan, schedule_kind
from megatron_glue.config.validation import validate
from megatron_glue.data.tokenizer import build_tokenizer
from megatron_glue.parallel.mesh import DENSE_AXES, EXPERT_AXES, TOKEN_AXES, axis_sizes_of
from megatron_glue.parallel.precision import Precision
from megatron_glue.training.planning.memory import MemoryEstimate, axis_sizes, estimate_memory
from megatron_glue.training.planning.parameters import AxisSizes, rank_parameters
from megatron_glue.training.start_report import optimisations

GIB = 2**30
_AXIS_MEANINGS = {
    "pp": "layers (pipeline)",
    "dp": "data",
    "cp": "each sequence (context)",
    "tensor": "each layer's weights (tensor)",
    "dp_replicate": "replicas of sharded weights",
    "fsdp": "sharded weights",
    "edp": "replicas of experts",
    "ep": "experts",
    "etp": "each expert",
}
_SHARDED_AXES = ("dp_replicate", "fsdp")
_CHECKPOINT_BYTES = 12
"""Of one number: weight and two moments in fp32."""


def dry_run(resolved: ResolvedConfig, console: Console | None = None) -> None:
    """Check a configuration for a number of ranks and print what it would become.

    Args:
        resolved: With ``dry_run`` set.
        console: Where to; ``None`` for standard output.

    Raises:
        ConfigError: If the configuration cannot run on these ranks.
    """
    config, plan = resolved.config, resolved.dry_run
    assert plan is not None, "somebody asked for a dry run"
    console = console or Console(highlight=False, markup=False, emoji=False)
    device_type = _device_type(config)
    warnings = [*resolved.warnings, *validate(config, plan.world_size, device_type), *_data_warnings(config)]
    vocab_size = build_tokenizer(config.data).vocab_size
    estimates = estimate_memory(config, plan.world_size, vocab_size, device_type)
    for warning in warnings:
        console.print(f"warning: {warning}", soft_wrap=True)
    console.print(describe(resolved), soft_wrap=True)
    for line in _layout_lines(config, plan):
        console.print(line, soft_wrap=True)
    for line in (*_memory_lines(config, estimates), *_start_lines(config, plan, vocab_size, device_type)):
        console.print(line, soft_wrap=True)
    for entry in optimisations(config, resolved.provenance):
        console.print(entry.describe(), soft_wrap=True)
    console.print("dry run: all that can be checked without starting is fine; nothing was started", soft_wrap=True)


def _device_type(config: RunConfig) -> str:
    """The configured device, whether or not this machine has it."""
    if config.training.device != "auto":
        return config.training.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _data_warnings(config: RunConfig) -> Iterator[str]:
    """The plan may be made on another machine than the run, so a missing file is no error yet."""
    for path in config.data.data_path:
        if not Path(path).is_file():
            yield f"{flag_of('data_path')}={path}: no such file on this machine"


def _layout_lines(config: RunConfig, plan: DryRun) -> Iterator[str]:
    """Yield how many ranks there are, and for each axis which ranks its first group is made of."""
    parallel, num_nodes = config.parallel, math.ceil(plan.world_size / plan.ranks_per_node)
    yield f"ranks: {plan.world_size} on {num_nodes} machine(s) of {plan.ranks_per_node}"
    seen: set[str] = set()
    views = axis_sizes_of(parallel, plan.world_size, config.model.num_kv_heads)
    for axes, sizes in zip((TOKEN_AXES, DENSE_AXES, EXPERT_AXES), views, strict=True):
        stride = plan.world_size
        for axis in axes:
            size = sizes[axis]
            stride //= size
            is_shown = size > 1 and axis in _AXIS_MEANINGS and axis not in seen
            seen.add(axis)
            if not is_shown or (axis in _SHARDED_AXES and parallel.data_parallel_engine != "fsdp2"):
                continue
            yield f"  {axis} {size}, {_AXIS_MEANINGS[axis]}: {_group(size, stride, plan)}"
    stages = StagePlan.from_config(config)
    if stages.num_ranks > 1:
        yield f"  pipeline: {schedule_kind(config)}, {stages.describe()}"


def _group(size: int, stride: int, plan: DryRun) -> str:
    """Name the first group of an axis, and say whether it stays on one machine."""
    ranks = [index * stride for index in range(size)]
    shown = ", ".join(map(str, ranks if size <= 4 else ranks[:2])) + (f", ... {ranks[-1]}" if size > 4 else "")
    # Groups repeat every size * stride ranks: all of them stay inside a machine if that divides its ranks.
    span = size * stride
    is_inside = plan.world_size <= plan.ranks_per_node or (
        span <= plan.ranks_per_node and plan.ranks_per_node % span == 0
    )
    return f"ranks {shown} and so on, {'inside a machine' if is_inside else 'across machines'}"


def _memory_lines(config: RunConfig, estimates: list[MemoryEstimate]) -> Iterator[str]:
    """Yield a table in GiB with a row for each pipeline rank."""
    parts = ("parameters", "gradients", "optimizer", "transit", "activations", "working", "loss", "total")
    plan = StagePlan.from_config(config)
    yield "memory per rank in GiB, estimated, without CUDA context, NCCL and fragmentation"
    yield f"  {'stage':>5}  {'layers':>8}  {'numbers':>8}  " + "  ".join(f"{part:>11}" for part in parts)
    for estimate in estimates:
        layers = "+".join(str(len(plan.layers[stage])) for stage in plan.stages_of(estimate.pp_rank))
        sizes = "  ".join(f"{getattr(estimate, part) / GIB:11.3f}" for part in parts)
        yield f"  {estimate.pp_rank:>5}  {layers:>8}  {_count(estimate.num_parameters):>8}  {sizes}"
    yield (
        "  numbers: of a rank, before its engine splits them; transit: gathered weights, gradients on their way; "
        "working: the recomputed block, gradients of activations; loss: logits, not at the same time as working"
    )


def _start_lines(config: RunConfig, plan: DryRun, vocab_size: int, device_type: str) -> Iterator[str]:
    """Yield what would start."""
    training, parallel = config.training, config.parallel
    sizes = axis_sizes(config, plan.world_size)
    alone = config.model_copy(update={"parallel": type(parallel)()})
    whole = sum(tensor.numel for tensor in rank_parameters(alone, AxisSizes(), 0, vocab_size))
    packs = training.global_batch_size // (training.micro_batch_size * sizes.dp)
    num_nodes = math.ceil(plan.world_size / plan.ranks_per_node)
    yield f"model: {_count(whole)} parameters, {Precision.from_name(training.precision, device_type).compute_dtype}"
    yield (
        f"step: {training.global_batch_size} packs of {config.data.seq_length} tokens, {packs} micro-batch(es) of "
        f"{training.micro_batch_size} per data-parallel rank; {training.train_iters} steps, "
        f"{_count(training.train_iters * training.global_batch_size * config.data.seq_length)} tokens"
    )
    yield f"kernels: {_kernels(config, device_type)}"
    yield f"data: {' '.join(config.data.data_path) or 'the embedded corpus'}; it is read at start"
    folder = training.save or "a new folder per start"
    yield f"checkpoints: {folder}, about {_CHECKPOINT_BYTES * whole / GIB:.2f} GiB each"
    yield (
        f"would start: {num_nodes} x torchrun --nnodes {num_nodes} --nproc-per-node "
        f"{min(plan.ranks_per_node, plan.world_size)}, engine {parallel.data_parallel_engine}, on {device_type}"
    )


def _kernels(config: RunConfig, device_type: str) -> str:
    if device_type != "cpu":
        return "chosen at start, by what the device can do"
    backends = resolve(
        config.backend,
        device_type,
        Precision.from_name(config.training.precision, device_type).compute_dtype,
        head_dim=config.model.head_dim,
        attention_dropout=config.model.attention_dropout,
    )
    return backends.describe()


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return f"{number:.0f}"
