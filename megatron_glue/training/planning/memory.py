"""How much device memory each rank of a run needs, estimated from the configuration.

Everything is in bytes. With n numbers on a rank before the data-parallel engine splits anything, c bytes of the compute
dtype, and N ranks that an engine splits a parameter over (dense: fsdp, experts: edp; DeepSpeed: dp x cp and edp):

    engine, stage     parameters               gradients      optimizer   gathered and in transit
    one rank, ddp     4 n, + c n copies        4 n            8 n         buckets of experts and of pipelines
    fsdp2 3           4 n / N                  4 n / N        8 n / N     two blocks and ends c, a block's gradients 4
    fsdp2 2           4 n / N                  4 n / N        8 n / N     c n, a block's gradients 4
    fsdp2, pipeline   4 n / N                  4 n / N        8 n / N     c n, gradients 4 n
    deepspeed 0       4 n, + c n copies        4 n            8 n         one bucket
    deepspeed 1       c n + 4 n / N            4 n            8 n / N     one bucket
    deepspeed 2       c n + 4 n / N            4 n / N        8 n / N     one bucket
    deepspeed 3       (c + 4) n / N            4 n / N        8 n / N     two blocks c, one bucket

A compute copy exists where c is not 4, not of tables and routers, which are read in fp32. DeepSpeed's fp32
masters are copies even in fp32. The loss keeps the gradients of its input and of the output weight (4 D V) beside a
chunk of logits and its softmax, of real entries of the vocabulary only. Activations: see ``activations.py``.

Left out: the CUDA context and NCCL (1 to 3 GiB), fragmentation, position tables, the batch itself, an optimizer's
temporaries, uneven expert load, and what ``--deepspeed-config`` moves to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_glue.config.sections import RunConfig
from megatron_glue.config.stage_plan import StagePlan
from megatron_glue.models.build import loss_chunk_tokens
from megatron_glue.parallel.engines.flat_reducer import DEFAULT_BUCKET_BYTES
from megatron_glue.parallel.mesh import axis_sizes_of
from megatron_glue.parallel.precision import Precision
from megatron_glue.training.planning.activations import activation_bytes
from megatron_glue.training.planning.parameters import AxisSizes, TensorSize, rank_parameters, vocabulary_rows

MASTER_BYTES = 4
MOMENT_BYTES = 8
DEEPSPEED_BUCKET_NUMBERS = 500_000_000
"""DeepSpeed's own ``reduce_bucket_size``."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Of one rank, in bytes.

    Attributes:
        pp_rank: Its place in the pipeline; all ranks of a stage need the same.
        num_parameters: Numbers that it holds before the engine splits them.
        parameters: Masters and compute copies.
        gradients: As the optimizer sees them.
        optimizer: Moments.
        transit: Gathered weights, and gradients on their way to other ranks.
        activations: Kept from forward to backward.
        working: The block that is being recomputed, and gradients of activations.
        loss: A chunk of logits, and the gradients that the loss keeps; not at the same time as ``working``.
    """

    pp_rank: int
    num_parameters: int
    parameters: float
    gradients: float
    optimizer: float
    transit: float
    activations: float
    working: float
    loss: float

    @property
    def total(self) -> float:
        """At the worst moment of a step."""
        states = self.parameters + self.gradients + self.optimizer + self.transit
        return states + self.activations + max(self.working, self.loss)


def estimate_memory(config: RunConfig, world_size: int, vocab_size: int, device_type: str) -> list[MemoryEstimate]:
    """Estimate every pipeline rank's need.

    Args:
        config: A configuration that is valid for this number of ranks.
        world_size: Number of ranks.
        vocab_size: Real entries of the vocabulary.
        device_type: ``cpu`` or ``cuda``.

    Returns:
        One estimate per pipeline rank; all ranks at the same place of a pipeline need the same.
    """
    sizes = axis_sizes(config, world_size)
    compute_bytes = Precision.from_name(config.training.precision, device_type).compute_dtype.itemsize
    estimates = []
    for pp_rank in range(sizes.pp):
        tensors = rank_parameters(config, sizes, pp_rank, vocab_size)
        states = _states(config, sizes, tensors, compute_bytes)
        activations = activation_bytes(config, sizes, pp_rank, compute_bytes)
        is_last = config.model.num_layers - 1 in _layers(config, pp_rank)
        estimates.append(
            MemoryEstimate(
                pp_rank=pp_rank,
                num_parameters=sum(tensor.numel for tensor in tensors),
                parameters=states.parameters,
                gradients=states.gradients,
                optimizer=states.optimizer,
                transit=states.transit if world_size > 1 else 0.0,
                activations=activations.kept,
                working=activations.working,
                loss=_loss(config, sizes, (vocab_size, compute_bytes), device_type) if is_last else 0.0,
            )
        )
    return estimates


def axis_sizes(config: RunConfig, world_size: int) -> AxisSizes:
    """Work out the axes of a configuration.

    Args:
        config: A validated configuration.
        world_size: Number of ranks.

    Raises:
        ConfigError: If the sizes do not divide the world or each other.
    """
    token, dense, expert = axis_sizes_of(config.parallel, world_size, config.model.num_kv_heads)
    return AxisSizes(
        pp=token["pp"],
        dp=token["dp"],
        cp=token["cp"],
        tp=token["tensor"],
        kv_copies=dense["kv_copy"],
        fsdp=dense["fsdp"],
        ep=expert["ep"],
        etp=expert["etp"],
        edp=expert["edp"],
        sequence_parallel=config.parallel.sequence_parallel and token["tensor"] > 1,
    )


@dataclass(frozen=True)
class _States:
    parameters: float
    gradients: float
    optimizer: float
    transit: float


def _layers(config: RunConfig, pp_rank: int) -> set[int]:
    plan = StagePlan.from_config(config)
    return {layer for stage in plan.stages_of(pp_rank) for layer in plan.layers[stage]}


def _states(config: RunConfig, sizes: AxisSizes, tensors: Sequence[TensorSize], compute_bytes: int) -> _States:
    engine = config.parallel.data_parallel_engine
    if sizes.dp * sizes.cp * sizes.tp * sizes.pp * sizes.ep == 1 or engine == "ddp":
        return _replicated(sizes, tensors, compute_bytes)
    if engine == "fsdp2":
        return _fsdp2(config, sizes, tensors, compute_bytes)
    return _deepspeed(config, sizes, tensors, compute_bytes)


def _replicated(sizes: AxisSizes, tensors: Sequence[TensorSize], compute_bytes: int) -> _States:
    whole = sum(tensor.numel for tensor in tensors)
    # Buckets of one gradient are that gradient; DDP's own buckets are the gradients themselves.
    in_buckets = sum(
        tensor.numel
        for tensor in tensors
        if (sizes.edp > 1 if tensor.is_expert else sizes.pp > 1 and sizes.dp * sizes.cp > 1)
        and tensor.numel * MASTER_BYTES < DEFAULT_BUCKET_BYTES
    )
    return _States(
        parameters=MASTER_BYTES * whole + _copies(tensors, compute_bytes),
        gradients=MASTER_BYTES * whole,
        optimizer=MOMENT_BYTES * whole,
        transit=MASTER_BYTES * in_buckets,
    )


def _copies(tensors: Sequence[TensorSize], compute_bytes: int) -> float:
    if compute_bytes == MASTER_BYTES:
        return 0.0
    return compute_bytes * sum(t.numel for t in tensors if not t.is_table and not t.keeps_fp32)


def _split(tensors: Sequence[TensorSize], num_ranks: Callable[[TensorSize], int]) -> float:
    return sum(tensor.numel / num_ranks(tensor) for tensor in tensors)


def _fsdp2(config: RunConfig, sizes: AxisSizes, tensors: Sequence[TensorSize], compute_bytes: int) -> _States:
    def num_ranks(tensor: TensorSize) -> int:
        if tensor.keeps_fp32 and compute_bytes != MASTER_BYTES:
            return 1
        return sizes.edp if tensor.is_expert else sizes.fsdp

    own = _split(tensors, num_ranks)
    whole = sum(tensor.numel for tensor in tensors)
    largest = _largest_block(tensors)
    ends = sum(tensor.numel for tensor in tensors if tensor.layer is None)
    keeps_gathered = config.parallel.zero_stage == 2 or sizes.pp > 1
    gathered = whole if keeps_gathered else min(2 * largest + ends, whole)
    gradients = whole if sizes.pp > 1 else largest
    return _States(
        parameters=MASTER_BYTES * own,
        gradients=MASTER_BYTES * own,
        optimizer=MOMENT_BYTES * own,
        transit=compute_bytes * gathered + MASTER_BYTES * gradients,
    )


def _deepspeed(config: RunConfig, sizes: AxisSizes, tensors: Sequence[TensorSize], compute_bytes: int) -> _States:
    whole = sum(tensor.numel for tensor in tensors)
    own = _split(tensors, lambda tensor: sizes.edp if tensor.is_expert else sizes.dp * sizes.cp)
    stage = 1 if config.parallel.zero_stage is None else config.parallel.zero_stage
    bucket = MASTER_BYTES * min(whole, DEEPSPEED_BUCKET_NUMBERS)
    if stage == 0:
        parameters, optimizer = MASTER_BYTES * whole + _copies(tensors, compute_bytes), MOMENT_BYTES * whole
        return _States(parameters, MASTER_BYTES * whole, optimizer, bucket)
    gathered = 2 * compute_bytes * _largest_block(tensors) if stage == 3 else 0.0
    return _States(
        parameters=compute_bytes * (own if stage == 3 else whole) + MASTER_BYTES * own,
        gradients=MASTER_BYTES * (whole if stage == 1 else own),
        optimizer=MOMENT_BYTES * own,
        transit=gathered + bucket,
    )


def _largest_block(tensors: Sequence[TensorSize]) -> int:
    blocks: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layer is not None:
            blocks[tensor.layer] = blocks.get(tensor.layer, 0) + tensor.numel
    return max(blocks.values(), default=0)


def _loss(config: RunConfig, sizes: AxisSizes, vocabulary: tuple[int, int], device_type: str) -> float:
    """The loss behind the last block: final norm, one chunk of logits, and the gradients that it keeps."""
    vocab_size, compute_bytes = vocabulary
    tokens = config.training.micro_batch_size * config.data.seq_length / sizes.cp
    width, rows = config.model.hidden_size, vocabulary_rows(config, sizes, vocab_size)
    chunk_tokens = min(loss_chunk_tokens(config, vocab_size, device_type), tokens)
    is_mixed = compute_bytes != MASTER_BYTES
    num_real = min(rows, vocab_size)
    gradient = MASTER_BYTES * num_real * width
    # Forward: logits, their softmax, and their gradient in the compute dtype; the weight in it.
    logits = chunk_tokens * num_real * (2 * MASTER_BYTES + (compute_bytes if is_mixed else 0))
    weight = compute_bytes * num_real * width if is_mixed else 0.0
    # Backward: the scaled gradient of the padded weight.
    scaled = MASTER_BYTES * rows * width
    return gradient + max(logits + weight, scaled) + 3 * compute_bytes * tokens * width
