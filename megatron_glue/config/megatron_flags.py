"""What Megatron-LM's other flags mean here, so that launch scripts carry over.

Flags whose names and values agree need no line: they are generated from the sections. The rest is one of four kinds:
translated to a setting, already satisfied by how this framework works, accepted and not used (one warning lists them),
or refused because ignoring it would train something else than the script asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Translation:
    """A Megatron-LM flag that sets fields under other names.

    Attributes:
        words: Fields and values for each word behind the flag; the word is empty for a flag without a value.
        is_approximate: Whether the meaning differs enough that the user should be told.
    """

    words: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_approximate: bool = False


def _switch(*, is_approximate: bool = False, **values: Any) -> Translation:
    return Translation({"": values}, is_approximate)


TRANSLATED: dict[str, Translation] = {
    "--bf16": _switch(precision="bf16"),
    "--mock-data": _switch(data_path=(), is_approximate=True),
    "--use-rotary-position-embeddings": _switch(position_embedding_type="rope"),
    "--no-position-embedding": _switch(position_embedding_type="none"),
    "--use-torch-fsdp2": _switch(data_parallel_engine="fsdp2"),
    "--use-distributed-optimizer": _switch(data_parallel_engine="fsdp2", zero_stage=2, is_approximate=True),
    "--deepspeed": _switch(data_parallel_engine="deepspeed"),
    "--recompute-activations": _switch(recompute_granularity="selective"),
    "--moe-router-pre-softmax": _switch(moe_router_norm_topk_prob=False),
    "--moe-router-load-balancing-type": Translation(
        {
            "aux_loss": {"moe_aux_loss_scope": "micro-batch"},
            "seq_aux_loss": {"moe_aux_loss_scope": "sequence"},
            "none": {"moe_aux_loss_coeff": 0.0},
        }
    ),
    "--optimizer": Translation({"adam": {}}),
}
"""Flags with another name here."""

FIELD_WORDS: dict[str, dict[str, str]] = {
    "position_embedding_type": {"learned_absolute": "learned"},
    "attention_backend": {"flash": "auto", "fused": "auto", "unfused": "auto", "local": "auto"},
}
"""Words of Megatron-LM behind flags that exist here, and the word each is taken as."""

APPROXIMATE_WORD_FIELDS = frozenset({"attention_backend"})
"""Fields among ``FIELD_WORDS`` whose translation the user should be told about."""

SATISFIED: dict[str, int] = {
    "--use-mcore-models": 0,
    "--group-query-attention": 0,
    "--moe-grouped-gemm": 0,
    "--reset-position-ids": 0,
    "--reset-attention-mask": 0,
    "--eod-mask-loss": 0,
    "--attention-softmax-in-fp32": 0,
    "--accumulate-allreduce-grads-in-fp32": 0,
    "--calculate-per-token-loss": 0,
    "--auto-detect-ckpt-format": 0,
    "--use-dist-ckpt": 0,
    "--exit-signal-handler": 0,
}
"""Flags that ask for what is always done here, and the number of values behind each."""

IGNORED: dict[str, int] = {
    "--use-flash-attn": 0,
    "--transformer-impl": 1,
    "--no-masked-softmax-fusion": 0,
    "--no-bias-gelu-fusion": 0,
    "--no-bias-swiglu-fusion": 0,
    "--no-bias-dropout-fusion": 0,
    "--no-rope-fusion": 0,
    "--no-persist-layer-norm": 0,
    "--no-gradient-accumulation-fusion": 0,
    "--apply-query-key-layer-scaling": 0,
    "--cross-entropy-loss-fusion": 0,
    "--cross-entropy-fusion-impl": 1,
    "--distributed-backend": 1,
    "--local-rank": 1,
    "--overlap-grad-reduce": 0,
    "--overlap-param-gather": 0,
    "--tp-comm-overlap": 0,
    "--use-cpu-initialization": 0,
    "--manual-gc": 0,
    "--manual-gc-interval": 1,
    "--empty-unused-memory-level": 1,
    "--moe-permute-fusion": 0,
    "--moe-per-layer-logging": 0,
    "--moe-router-dtype": 1,
    "--split": 1,
    "--vocab-file": 1,
    "--merge-file": 1,
    "--vocab-size": 1,
    "--data-cache-path": 1,
    "--dataloader-type": 1,
    "--num-workers": 1,
    "--no-mmap-bin-files": 0,
    "--no-create-attention-mask-in-dataloader": 0,
    "--ckpt-format": 1,
    "--no-load-rng": 0,
    "--no-save-rng": 0,
    "--initial-loss-scale": 1,
    "--loss-scale": 1,
    "--loss-scale-window": 1,
    "--min-loss-scale": 1,
    "--hysteresis": 1,
    "--no-check-for-nan-in-loss-and-grad": 0,
    "--timing-log-level": 1,
    "--log-throughput": 0,
    "--log-params-norm": 0,
    "--log-num-zeros-in-grad": 0,
    "--log-timers-to-tensorboard": 0,
    "--log-memory-to-tensorboard": 0,
    "--log-validation-ppl-to-tensorboard": 0,
    "--tensorboard-log-interval": 1,
    "--tensorboard-queue-size": 1,
    "--wandb-save-dir": 1,
    "--profile": 0,
}
"""Flags that are accepted and not used, and the number of values behind each.

They choose among kernels, communication, storage and logs, or name files that are not read here; none of them changes
the model or the optimizer of a new run.
"""


@dataclass(frozen=True)
class Refusal:
    """Why a Megatron-LM flag is an error here.

    Attributes:
        num_values: Values behind the flag.
        reason: Why it cannot be honoured.
        remedy: What to use instead.
    """

    num_values: int
    reason: str
    remedy: str


REFUSED: dict[str, Refusal] = {
    "--fp16": Refusal(0, "fp16 training is not available in this version", "use --bf16 or --precision fp32"),
    "--fp8-format": Refusal(1, "fp8 training is not available in this version", "drop it and use --bf16"),
    "--train-samples": Refusal(1, "runs are counted in iterations", "use --train-iters SAMPLES / GLOBAL_BATCH_SIZE"),
    "--lr-decay-samples": Refusal(1, "runs are counted in iterations", "use --lr-decay-iters"),
    "--lr-warmup-samples": Refusal(1, "runs are counted in iterations", "use --lr-warmup-iters"),
    "--lr-warmup-fraction": Refusal(1, "warmup is counted in iterations", "use --lr-warmup-iters"),
    "--rampup-batch-size": Refusal(3, "the global batch has one size", "use --global-batch-size alone"),
    "--finetune": Refusal(0, "a run resumes whole or starts new", "start with an empty --save folder"),
    "--apply-layernorm-1p": Refusal(0, "norm weights start at one here", "use --normalization RMSNorm or LayerNorm"),
    "--squared-relu": Refusal(0, "the feed-forward is SwiGLU or GELU", "use --swiglu or --no-swiglu"),
    "--multi-latent-attention": Refusal(0, "not available in this version", "use --num-query-groups"),
    "--mtp-num-layers": Refusal(1, "not available in this version", "drop it"),
    "--moe-expert-capacity-factor": Refusal(
        1, "experts drop no tokens here", "drop it, or bound the exchanges with --moe-static-capacity-factor"
    ),
    "--moe-pad-expert-input-to-capacity": Refusal(0, "experts drop no tokens here", "drop it"),
    "--moe-input-jitter-eps": Refusal(1, "the router adds no noise", "drop it"),
    "--moe-router-num-groups": Refusal(1, "routing limited to groups is not available in this version", "drop it"),
    "--moe-router-group-topk": Refusal(1, "routing limited to groups is not available in this version", "drop it"),
}
"""Flags that would train something else if they were ignored."""
