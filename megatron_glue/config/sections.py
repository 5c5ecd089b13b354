"""The sections of a run's configuration: small, frozen, each field with its unit and its off-value.

Flat flag names are generated from the field names (``num_layers`` -> ``--num-layers``), so they match Megatron-LM's.
Rules that touch one field stand here; rules that cross sections stand in ``validation.py``; where values come from is
``loading.py``'s business. This file reads no environment and no file.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_glue.config.fault_section import FaultConfig
from megatron_glue.config.model_sections import ModelConfig, MoEConfig
from megatron_glue.config.section import (
    MAX_COUNT,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Probability,
    Section,
    option,
)

OFFLOAD_REGIONS = ("attn_core", "mlp_act", "moe_act")
"""What ``--offload-modules`` can name: attention's kernel and the product behind it, the nonlinearity of a feed-forward
and the product behind it, the experts of an MoE layer with dispatch and combine."""


RECOMPUTE_MODULES = ("core_attn", "mlp", "moe", "layernorm", "moe_act")
"""What ``--recompute-modules`` can name, in Megatron-LM's words: attention's kernel, a dense feed-forward (also the
shared expert), an MoE layer, the results of a block's two norms, the results of the nonlinearity of experts."""


class ParallelConfig(Section):
    """How ranks share the work. Sizes of 1 are off; data parallel size is what remains of the world."""

    tensor_model_parallel_size: PositiveInt = option(1, "Ranks that split each layer's weights; off: 1.")
    sequence_parallel: bool = option(
        False, "Tensor-parallel ranks also split the tokens between their products; needed with experts; off: false."
    )
    pipeline_model_parallel_size: PositiveInt = option(1, "Ranks that split the layers; off: 1.")
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved", "zb"] = option(
        "1f1b", "Order of forward and backward passes of a pipeline; zb: zero bubble, weight gradients last."
    )
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = option(
        None, "Layers of one virtual stage, of which each pipeline rank then holds several; off: unset."
    )
    decoder_first_pipeline_num_layers: PositiveInt | None = option(
        None, "Layers of the first stage; unset: as even as possible."
    )
    decoder_last_pipeline_num_layers: PositiveInt | None = option(
        None, "Layers of the last stage; unset: as even as possible."
    )
    context_parallel_size: PositiveInt = option(1, "Ranks that split each sequence; off: 1.")
    cp_comm_type: Literal["allgather", "p2p"] = option(
        "allgather",
        "How context-parallel ranks see each other's keys and values: all at once, or block by block in a ring (p2p).",
        values={"allgather": "allgather", "all_gather": "allgather", "p2p": "p2p"},
    )
    expert_model_parallel_size: PositiveInt = option(1, "Ranks that split the experts; off: 1.")
    expert_tensor_parallel_size: PositiveInt = option(1, "Ranks that split each expert; off: 1.")
    data_parallel_engine: Literal["ddp", "fsdp2", "deepspeed"] = option(
        "ddp", "Replicated weights (ddp), sharded ones (fsdp2), or DeepSpeed's ZeRO (deepspeed)."
    )
    num_distributed_optimizer_instances: PositiveInt = option(
        1, "Replicas of the sharded weights under fsdp2 (HSDP): each is sharded over dp / N ranks; off: 1."
    )
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = option(
        None,
        "What data-parallel ranks split: 1 optimizer states, 2 also gradients, 3 also weights. fsdp2: 2 keeps gathered "
        "weights from forward to backward, 3 does not; unset: 3 for fsdp2, 1 for deepspeed.",
    )
    deepspeed_config: str | None = option(
        None, "DeepSpeed's own configuration, a JSON file that the derived one is merged into; off: unset."
    )
    distributed_timeout_minutes: PositiveInt = option(10, "Longest wait for another rank, in minutes.")

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that work on the same packs: tensor x pipeline x context parallel size."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


class DataConfig(Section):
    """Documents, tokenizer and packing."""

    data_path: tuple[str, ...] = option((), "JSONL files, .gz too; empty: the embedded corpus.")
    json_key: str = option("text", "Key of the document text in JSONL files.")
    tokenizer_type: Literal["byte"] = option("byte", "How text becomes ids.")
    seq_length: Annotated[int, Field(ge=2, le=MAX_COUNT)] = option(512, "Tokens per pack.")
    segment_alignment: PositiveInt = option(
        1,
        "Places that a document takes in a pack are rounded up to a multiple of this, in tokens. Context parallelism "
        "needs a multiple of 2 x its size; packs depend on it, not on the layout, so take 2 x the largest size that "
        "will ever go on with the run. More only leaves more places empty (see the packing efficiency); off: 1.",
    )
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = option(0.02, "Share of documents kept for evaluation.")
    packing_window: PositiveInt = option(256, "Documents that first-fit-decreasing looks at together.")
    max_segment_tokens: NonNegativeInt = option(
        0, "Longer documents are cut into pieces of this many tokens, each a document of its own; off: 0."
    )
    max_documents: NonNegativeInt = option(0, "Use only the first N documents; off: 0.")


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule."""

    lr: Annotated[float, Field(gt=0)] = option(1e-3, "Peak learning rate.")
    min_lr: NonNegativeFloat = option(1e-4, "Learning rate at the end of decay.")
    lr_decay_style: Literal["cosine", "linear", "WSD", "constant"] = option("cosine", "Shape of the schedule.")
    lr_warmup_iters: NonNegativeInt = option(10, "Iterations of linear warmup; off: 0.")
    lr_decay_iters: PositiveInt | None = option(None, "Iteration at which decay ends; unset: the last one.")
    lr_wsd_decay_iters: PositiveInt | None = option(
        None, "Length of the final decay of WSD, in iterations; unset: a tenth of the run."
    )
    weight_decay: NonNegativeFloat = option(0.1, "Decoupled decay of matrices; norms and biases have none; off: 0.")
    adam_beta1: Probability = option(0.9, "Decay of Adam's first moment.")
    adam_beta2: Probability = option(0.95, "Decay of Adam's second moment.")
    adam_eps: Annotated[float, Field(gt=0)] = option(1e-8, "Added to Adam's denominator.")
    clip_grad: NonNegativeFloat = option(1.0, "Largest global gradient norm; off: 0.")


class AcceleratorConfig(Section):
    """The three optimisations, each with its own switch."""

    enable_metadata_cache: bool = option(
        False, "Build packed-sequence metadata once per micro-batch; off: in every layer.", flag="use_packed_cache"
    )
    cache_scope: Literal["micro-batch"] = option("micro-batch", "How long cached metadata lives.")
    enable_double_buffer: bool = option(
        False,
        "Recompute blocks from offloaded inputs that two buffers bring back; off: false.",
        flag="double_buffer_ckpt",
    )
    buffer_size_mb: NonNegativeInt = option(
        0, "Room for reload buffers on the device, in MiB; off (no bound): 0.", flag="double_buffer_size_mb"
    )
    enable_grouped_index: bool = option(
        True,
        "Group tokens by expert in one counting pass; off: one mask per expert.",
        flag="moe_grouping",
        values={"one-pass": True, "loop": False},
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Least important message shown.")
    metrics_interval: PositiveInt = option(
        10, "Iterations between reads of the accelerator's counters; logging steps in between go without them."
    )


class CacheConfig(Section):
    """What layers keep between micro-batches, with the metadata cache or without it."""

    cache_tier: Literal["device", "host"] = option(
        "device",
        "Where tables of positions wait: on the device, or in host memory, from which the rows of each micro-batch "
        "come over beside the step before.",
    )
    cache_limit_mb: NonNegativeInt = option(
        256,
        "Bound on what is kept between micro-batches (tables of positions, causal and window masks), in MiB; the least "
        "recently used gives way; off (keep nothing): 0.",
    )


class ActivationConfig(Section):
    """Recompute and offload of activations."""

    recompute_granularity: Literal["auto", "none", "full", "selective"] = option(
        "auto",
        "Recompute blocks in backward, whole (full) or some modules of them (selective); auto: full when offload or "
        "double buffer is on; off: none.",
    )
    recompute_modules: tuple[str, ...] = option(
        ("core_attn",),
        f"Modules that --recompute-granularity selective recomputes: {', '.join(RECOMPUTE_MODULES)}.",
    )
    recompute_method: Literal["uniform", "block"] = option(
        "uniform", "Which blocks to recompute: all (uniform), or the first of each pipeline stage (block)."
    )
    recompute_num_layers: PositiveInt | None = option(
        None, "Blocks of a pipeline stage that --recompute-method block recomputes; unset: all."
    )
    activation_offload: bool = option(
        False, "Move block inputs off the device; implied by --double-buffer-ckpt, alone: one buffer; off: false."
    )
    offload_policy: Literal["all", "auto"] = option(
        "all",
        "Which block inputs leave the device: all, or as many as are found to be hidden behind compute in the first "
        "steps, perhaps none (auto).",
    )
    offload_num_layers: PositiveInt | None = option(
        None,
        "Blocks of a stage whose inputs leave, evenly spaced, whatever --offload-policy says; unset: as that says.",
    )
    offload_modules: tuple[str, ...] = option(
        (),
        "Modules whose tensors for backward move off the device instead of being recomputed: "
        f"{', '.join(OFFLOAD_REGIONS)}; off: none.",
    )
    offload_min_tensor_kb: NonNegativeInt = option(
        64, "Size below which a tensor of --offload-modules stays on the device, in KiB; off (all move): 0."
    )
    activation_offload_dir: str | None = option(
        None, "Folder of the disk tier (machines without an accelerator); unset: the run's own folder."
    )
    activation_integrated_memory: Literal["auto", "yes", "no"] = option(
        "auto", "Whether the device shares the host's memory, where two buffers do not pay; auto: ask the device."
    )
    activation_debug_poison: bool = option(False, "Fill freed reload slots with NaN; off: false.")
    offload_max_inflight: Annotated[int, Field(ge=1, le=2)] = option(
        2, "Copies of offloaded activations under way at one time; 1 leaves more to collectives; off (one each way): 2."
    )
    offload_max_mb_per_s: NonNegativeFloat = option(
        0.0, "Most MiB per second that offload moves each way on the disk tier; off (no bound): 0."
    )
    conservative_sync: bool = option(
        False,
        "Wait for compute and copies at every hand-over of an offloaded input, to bisect a suspected race; off: false.",
    )


class BackendConfig(Section):
    """Which kernel serves each role. ``auto`` takes the first that works on this machine."""

    attention_backend: Literal["auto", "segments", "varlen", "flex", "dense", "te"] = option(
        "auto", "Packed attention; te: Transformer Engine."
    )
    norm_backend: Literal["auto", "torch", "cpu", "te", "apex"] = option("auto", "RMSNorm and LayerNorm.")
    grouped_mm_backend: Literal["auto", "torch", "cores", "onednn", "loop"] = option(
        "auto", "Product of grouped rows and expert weights; cores and onednn: on a CPU, each core takes some experts."
    )
    grouping_backend: Literal["auto", "numpy", "triton", "torch"] = option("auto", "One-pass grouping.")
    permutation_backend: Literal["auto", "triton", "torch"] = option("auto", "Rows into expert order and back.")
    router_backend: Literal["auto", "triton", "torch"] = option("auto", "Scores, choice and weights from logits.")
    optimizer_backend: Literal["auto", "fused", "foreach", "te", "apex"] = option("auto", "AdamW update.")
    host_allocator: Literal["auto", "system"] = option(
        "auto", "Let glibc keep freed memory for the next step on a CPU; off: system, as the C library comes."
    )
    matmul_backend: Literal["auto", "torch", "onednn", "te"] = option(
        "auto", "Products of linear layers, experts and the loss; onednn: for fp32 on a CPU, te: for bf16 on CUDA."
    )
    cross_entropy_chunk_tokens: PositiveInt | None = option(
        None, "Tokens whose logits exist at once; unset: as many as make 8 MiB of logits on a CPU, 512 MiB elsewhere."
    )


class LoggingConfig(Section):
    """What the run tells and where."""

    log_interval: PositiveInt = option(10, "Iterations between progress lines.")
    progress: Literal["auto", "bar", "plain", "none"] = option("auto", "Live bar, plain lines or nothing.")
    summary_path: str | None = option(None, "Write the summary there as JSON; unset: nowhere.")
    sample_prompt: str = option("def ", "Text that the trained model continues; off: empty.")
    sample_tokens: NonNegativeInt = option(96, "Tokens of the sample continuation; off: 0.")
    metrics_path: str | None = option(
        None,
        "JSONL file that each logging step adds a record of figures to; unset: metrics.jsonl in the run's folder.",
    )
    tensorboard_dir: str | None = option(None, "Folder of TensorBoard files of the same figures; off: unset.")
    wandb_project: str | None = option(
        None, "Project in Weights & Biases that they go to (WANDB_MODE=offline: to the run's folder); off: unset."
    )
    wandb_exp_name: str | None = option(None, "Name of the run there; unset: --name.")
    metrics_port: Annotated[int, Field(ge=1, le=65535)] | None = option(
        None, "Port on which the first rank serves them to Prometheus, under /metrics; off: unset."
    )
    metrics_host: str = option("127.0.0.1", "Address that this port is bound to; 0.0.0.0: all of the machine's.")
    peak_tflops: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = option(
        None, "Dense peak of one device in TFLOP/s, for the MFU; unset: by its name, in bf16, where that is known."
    )
    expert_imbalance_alarm: NonNegativeFloat = option(
        8.0, "Load of an expert, as a multiple of an even share, above which a run says so; off: 0."
    )
    dead_expert_alarm: NonNegativeInt = option(
        5, "Logging steps in a row without a token after which an expert is reported as dead; off: 0."
    )
    length_drift_alarm: NonNegativeFloat = option(
        0.2, "Distance of recent document lengths from the epoch's, 0 to 1, above which a run says so; off: 0."
    )
    nvtx_ranges: bool = option(
        False, "Name the phases of a step for torch.profiler and, on a GPU, for Nsight Systems; off: false."
    )


class TrainConfig(Section):
    """The run itself."""

    accelerator: AcceleratorConfig = Field(default_factory=AcceleratorConfig, description="The three optimisations.")
    name: str = option("pretrain", "Name of the run; its folder is runs/NAME-TIME when --save is not given.")
    micro_batch_size: PositiveInt = option(1, "Packs per micro-batch and rank.")
    global_batch_size: PositiveInt = option(4, "Packs per optimizer step over all ranks.")
    train_iters: PositiveInt = option(100, "Optimizer steps of the whole run.")
    exit_interval: NonNegativeInt = option(0, "Save and stop when the iteration is a multiple of this; off: 0.")
    exit_duration_in_mins: NonNegativeInt = option(
        0, "Save and stop once the program has run this long, in minutes; off: 0."
    )
    eval_interval: NonNegativeInt = option(50, "Iterations between evaluations; off (only at the end): 0.")
    eval_iters: PositiveInt = option(4, "Micro-batches per rank and evaluation.")
    save: str | None = option(None, "Folder of checkpoints to write and to resume from; unset: a new folder per start.")
    save_interval: NonNegativeInt = option(50, "Iterations between checkpoints; off (only at the end): 0.")
    keep_last: PositiveInt = option(2, "Complete checkpoints kept on disk.")
    async_save: bool = option(False, "Write checkpoints in the background while training goes on; off: false.")
    load: str | None = option(
        None, "Run folder or checkpoint to start from when --save holds no checkpoint yet; off: unset."
    )
    load_fallback: bool = option(
        False, "If the newest checkpoint is damaged, take the newest good one; off (refuse): false."
    )
    check_ranks: bool = option(
        False, "Compare replicated weights and each micro-batch between the ranks that must agree; off: false."
    )
    prove_isolation: bool = option(
        False,
        "Before training, change one document of a pack after the other, and stop unless all others keep their outputs "
        "and gradients; off: false.",
    )
    seed: NonNegativeInt = option(1234, "Seed of weights, data order and dropout.")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "Where to compute; auto: a GPU if there is one.")
    precision: Literal["auto", "fp32", "bf16"] = option("auto", "Compute type; auto: bf16 on a GPU, fp32 on a CPU.")


class RunConfig(Section):
    """Everything one run is configured by."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    moe: MoEConfig = Field(default_factory=MoEConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    training: TrainConfig = Field(default_factory=TrainConfig)
    faults: FaultConfig = Field(default_factory=FaultConfig)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    activation: ActivationConfig = Field(default_factory=ActivationConfig)
    backend: BackendConfig = Field(default_factory=BackendConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    @property
    def accelerator(self) -> AcceleratorConfig:
        """The three optimisations (``training.accelerator`` in YAML)."""
        return self.training.accelerator

    @property
    def recompute(self) -> bool:
        """Whether blocks are recomputed in backward."""
        if self.activation.recompute_granularity == "auto":
            return self.offload and not self.activation.offload_modules
        return self.activation.recompute_granularity == "full"

    @property
    def recomputed_modules(self) -> frozenset[str]:
        """Modules of each block that are recomputed in backward; none where whole blocks are."""
        activation = self.activation
        return frozenset(activation.recompute_modules if activation.recompute_granularity == "selective" else ())

    @property
    def num_recomputed_blocks(self) -> int | None:
        """How many blocks of each pipeline stage are recomputed, the first ones; None: all (if any)."""
        return self.activation.recompute_num_layers if self.activation.recompute_method == "block" else None

    @property
    def offload(self) -> bool:
        """Whether block inputs, or tensors of chosen modules, leave the device between forward and backward."""
        activation = self.activation
        return (
            activation.activation_offload or bool(activation.offload_modules) or self.accelerator.enable_double_buffer
        )
