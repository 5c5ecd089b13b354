"""DeepSpeed's own configuration of a run: derived from ours, with the user's JSON file merged in.

What one of our flags decides is derived; a file that says otherwise is an error, and one that says the same, or
``"auto"``, is welcome. What would break a promise of every engine (gradients are sums) or of our checkpoints is
refused, and so is what would do nothing here because this package does it (recompute, data). Everything else in the
file goes to DeepSpeed as it is: buckets, overlap, offload to the CPU, profiling.

DeepSpeed itself is not needed here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import ParallelConfig, RunConfig
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.precision import Precision

AUTO = "auto"
FLAG = "--deepspeed-config"

_OWNED = {
    "train_batch_size": "--global-batch-size",
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "gradient_accumulation_steps": "--global-batch-size",
    "gradient_clipping": "--clip-grad",
    "zero_optimization.stage": "--zero-stage",
    "bf16.enabled": "--precision",
    "fp16.enabled": "--precision",
    "torch_autocast.enabled": "--precision",
}
"""Key of the file -> our flag that decides its value."""

_REFUSED = {
    "optimizer": ("the update is this package's AdamW", "set --lr, --weight-decay, --adam-beta1 and --adam-beta2"),
    "scheduler": ("the learning rate follows this package's schedule", "set --lr-decay-style and --lr-warmup-iters"),
    "tensor_parallel": ("this engine does not split layers", "use --data-parallel-engine ddp or fsdp2 for it"),
    "sequence_parallel_size": ("this engine does not split sequences", "use --data-parallel-engine ddp or fsdp2"),
    "data_parallel_size": ("it follows from the number of ranks", "leave it out"),
    "expert_parallel": ("experts are split by this package", "set --expert-model-parallel-size"),
    "pipeline": ("this engine does not split the model", "use --data-parallel-engine ddp or fsdp2 for it"),
    "gradient_allreduce_op": ("gradients are sums in every engine", "leave it out"),
    "prescale_gradients": ("gradients are sums in every engine", "leave it out"),
    "gradient_predivide_factor": ("gradients are sums in every engine", "leave it out"),
    "managed_gradient_accumulation": ("the training step says which micro-batch is the last", "leave it out"),
    "hybrid_engine": ("it is another engine", "leave it out"),
    "elasticity": ("the batch has one size", "set --global-batch-size"),
    "amp": ("the compute type is this package's", "set --precision"),
    "activation_checkpointing": (
        "blocks are recomputed and offloaded by this package",
        "use --recompute-granularity, --activation-offload or --double-buffer-ckpt",
    ),
    "sparse_attention": ("attention is this package's", "set --window-size"),
    "progressive_layer_drop": ("every step trains every layer", "leave it out"),
    "compression_training": ("weights are trained as they are", "leave it out"),
    "data_efficiency": ("data comes from this package", "leave it out"),
    "curriculum_learning": ("data comes from this package", "leave it out"),
    "zero_optimization.zenflow": ("it delays updates, and checkpoints would miss them", "leave it out"),
    "zero_optimization.round_robin_gradients": ("DeepSpeed's map of its masters is wrong with it", "leave it out"),
    "zero_optimization.elastic_checkpoint": ("checkpoints fit every layout as it is", "leave it out"),
    "bf16.bf16_master_weights_and_grads": ("master weights are fp32", "leave it out"),
    "bf16.bf16_optimizer_states": ("moments are fp32", "leave it out"),
    "data_types.grad_accum_dtype": ("gradients are accumulated in fp32", "leave it out"),
}
"""Key of the file -> why it cannot be used, and what to do."""


@dataclass(frozen=True)
class DeepSpeedRun:
    """What a run has decided already.

    Attributes:
        zero_stage: 0 to 3.
        dp_size: Data-parallel ranks.
        micro_batch_size: Packs per micro-batch and rank.
        num_micro_batches: Micro-batches per step and rank.
        clip_grad: Largest gradient norm; 0: none.
        is_bf16: Whether the compute dtype is bf16.
        config_path: The user's file; ``None`` for none.
    """

    zero_stage: int = 1
    dp_size: int = 1
    micro_batch_size: int = 1
    num_micro_batches: int = 1
    clip_grad: float = 0.0
    is_bf16: bool = False
    config_path: str | None = None

    @classmethod
    def from_parallel(cls, parallel: ParallelConfig, mesh: ParallelMesh, precision: Precision) -> DeepSpeedRun:
        """What the layout alone says: one micro-batch of one pack per step, no clipping."""
        return cls(
            zero_stage=1 if parallel.zero_stage is None else parallel.zero_stage,
            dp_size=mesh.dp_size,
            is_bf16=precision.is_mixed,
            config_path=parallel.deepspeed_config,
        )

    @classmethod
    def from_config(cls, config: RunConfig, mesh: ParallelMesh, precision: Precision) -> DeepSpeedRun:
        """What a run says."""
        training = config.training
        return replace(
            cls.from_parallel(config.parallel, mesh, precision),
            micro_batch_size=training.micro_batch_size,
            num_micro_batches=training.global_batch_size // (training.micro_batch_size * mesh.dp_size),
            clip_grad=config.optimizer.clip_grad,
        )

    @property
    def has_low_precision_weights(self) -> bool:
        """Whether DeepSpeed keeps bf16 weights beside its fp32 masters.

        Not in stage 0: there it would accumulate gradients in bf16, and the layers' own compute copies do better.
        """
        return self.is_bf16 and self.zero_stage > 0


def build_config(run: DeepSpeedRun) -> dict[str, Any]:
    """Derive the configuration and merge the user's file.

    Args:
        run: What our flags decided.

    Returns:
        What ``deepspeed.initialize`` takes as ``config``.

    Raises:
        ConfigError: If the file cannot be read, contradicts a flag, or asks for what cannot be had.
    """
    config = _derived(run)
    if run.config_path is None:
        return config
    given = read_config_file(run.config_path)
    for key, value in _leaves(given):
        _refuse(run, given, key, value)
        _check(run, key, value)
    return _merged(config, _without_owned(given))


def read_config_file(path: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: If the file is missing, is not JSON, or holds no object.
    """
    try:
        value = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(FLAG, path, f"cannot be read: {error.strerror}", "give a JSON file") from error
    except ValueError as error:
        raise ConfigError(FLAG, path, f"is not JSON: {error}", "correct the file") from error
    if not isinstance(value, dict):
        raise ConfigError(FLAG, path, "holds no JSON object", 'give one with DeepSpeed\'s keys, like {"bf16": {}}')
    return value


def _derived(run: DeepSpeedRun) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": run.micro_batch_size * run.num_micro_batches * run.dp_size,
        "train_micro_batch_size_per_gpu": run.micro_batch_size,
        "gradient_accumulation_steps": run.num_micro_batches,
        # Stage 0 leaves whole gradients on every rank, where ours counts experts right.
        "gradient_clipping": run.clip_grad if run.zero_stage > 0 else 0.0,
        "zero_optimization": {"stage": run.zero_stage},
        # torch's own AdamW, also with offloading.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
    if run.zero_stage < 3:
        # Stage 3 knows only means: there the loss is multiplied by their divisor.
        config["gradient_allreduce_op"] = "sum"
    if run.has_low_precision_weights:
        # Without the check, a norm that is not finite would reach the weights.
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
    return config


def _refuse(run: DeepSpeedRun, given: Mapping[str, Any], key: str, value: Any) -> None:
    """Refuse what would break a promise, or would have no effect although the file asks for it."""
    assert run.config_path is not None
    for refused, (reason, remedy) in _REFUSED.items():
        # False and null turn something off, as if it were not there.
        is_meant = (key == refused or key.startswith(f"{refused}.")) and value not in (False, None)
        if is_meant and not _is_disabled(given, refused):
            raise ConfigError(FLAG, run.config_path, f"{refused}: {reason}", remedy)


def _is_disabled(given: Mapping[str, Any], key: str) -> bool:
    """Whether a section of the file says of itself that it is not enabled."""
    section: Any = given
    for name in key.split("."):
        section = section.get(name) if isinstance(section, Mapping) else None
    return isinstance(section, Mapping) and section.get("enabled") is False


def _check(run: DeepSpeedRun, key: str, value: Any) -> None:
    """Refuse a value that contradicts our flags or promises."""
    assert run.config_path is not None
    if key.startswith("zero_optimization.offload_") and key.endswith(".device") and value == "nvme":
        reason = f"{key}=nvme: checkpoints need weights and moments in memory"
        raise ConfigError(FLAG, run.config_path, reason, 'offload to "cpu"')
    if key == "bf16.check_grad_overflow" and not value:
        raise ConfigError(FLAG, run.config_path, f"{key}: updates that are not finite are skipped", "leave it out")
    if key not in _OWNED or value == AUTO:
        return
    decided: Any = {
        "train_batch_size": run.micro_batch_size * run.num_micro_batches * run.dp_size,
        "train_micro_batch_size_per_gpu": run.micro_batch_size,
        "gradient_accumulation_steps": run.num_micro_batches,
        "gradient_clipping": run.clip_grad,
        "zero_optimization.stage": run.zero_stage,
        "bf16.enabled": run.is_bf16,
    }.get(key, False)
    if value != decided:
        raise ConfigError(
            FLAG,
            run.config_path,
            f"{key} is {json.dumps(value)}, and {_OWNED[key]} makes it {json.dumps(decided)}",
            f"leave the key out, write {json.dumps(AUTO)}, or set {_OWNED[key]}",
        )


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values, and each section under its own key too if it is empty."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _without_owned(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Drop what is derived: it was found to say the same."""
    return {
        key: _without_owned(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in section.items()
        if f"{prefix}{key}" not in _OWNED
    }


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Take ``over`` where it says something, section by section."""
    result: dict[str, Any] = copy.deepcopy(dict(base))
    for key, value in over.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result
