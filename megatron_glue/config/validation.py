"""Combinations of settings that make no sense, found before anything is built.

Each rule yields an error with the flag, its value, the reason and a remedy. Rules about one field stand with the field
in ``sections.py``. Whether this machine has the devices and kernels that a run asks for is found out by
``parallel/launch.py`` and ``backends/registry.py``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.layout_rules import LAYOUT_RULES, Rule, layout_warnings
from megatron_glue.config.sections import (
    OFFLOAD_REGIONS,
    RECOMPUTE_MODULES,
    ActivationConfig,
    MoEConfig,
    RunConfig,
)


def validate(config: RunConfig, world_size: int, device_type: str | None = None) -> list[str]:
    """Check every rule.

    Args:
        config: The configuration of a run.
        world_size: Number of ranks it will run on.
        device_type: ``cpu`` or ``cuda`` where it is known already; ``None`` takes ``--device``.

    Returns:
        Warnings: settings that work, but hardly as meant.

    Raises:
        ConfigError: For the first rule that is broken.
    """
    for error in problems(config, world_size):
        raise error
    return list(_warnings(config, world_size, device_type or config.training.device))


def problems(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    """Yield every broken rule, most basic first.

    Args:
        config: The configuration of a run.
        world_size: Number of ranks it will run on.
    """
    for rule in RULES:
        yield from rule(config, world_size)


def _error(field: str, value: Any, reason: str, remedy: str) -> ConfigError:
    return ConfigError(flag_of(field), value, reason, remedy)


def _heads(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    model = config.model
    heads = model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads:
        yield _error(
            "num_attention_heads",
            heads,
            f"does not divide --hidden-size {model.hidden_size}",
            "use a divisor, or give the width of a head with --kv-channels",
        )
    if heads % model.num_kv_heads:
        yield _error(
            "num_query_groups",
            model.num_kv_heads,
            f"does not divide --num-attention-heads {heads}",
            "use a divisor of the number of heads",
        )


def _positions(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    model = config.model
    kind = model.position_embedding_type
    if kind == "rope":
        rotated = int(model.head_dim * model.rotary_percent)
        if rotated < 2 or rotated % 2:
            yield _error(
                "rotary_percent",
                model.rotary_percent,
                f"rotates {rotated} of {model.head_dim} channels of a head; RoPE needs pairs of them",
                "choose it, or --kv-channels, so that an even number of at least 2 is rotated",
            )
    if kind == "sinusoidal" and model.hidden_size % 2:
        yield _error(
            "hidden_size", model.hidden_size, "sinusoidal positions need an even width", "use an even --hidden-size"
        )
    longest = model.max_position_embeddings
    if kind != "none" and longest is not None and config.data.seq_length > longest:
        yield _error(
            "max_position_embeddings",
            longest,
            f"shorter than --seq-length {config.data.seq_length}, so late tokens would have no position",
            f"use at least {config.data.seq_length}, or leave it unset",
        )


def _layer_patterns(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    layers = config.model.num_layers
    patterns = {
        "moe_layer_freq": config.moe.moe_layer_freq,
        "window_attn_skip_freq": config.model.window_attn_skip_freq,
    }
    for field, pattern in patterns.items():
        if not isinstance(pattern, tuple):
            continue
        shown = " ".join(str(entry) for entry in pattern) or "empty"
        if len(pattern) != layers:
            yield _error(
                field, shown, f"has {len(pattern)} entries for --num-layers {layers}", "give one 0 or 1 per layer"
            )
        elif set(pattern) - {0, 1}:
            yield _error(field, shown, "has entries other than 0 and 1", "give one 0 or 1 per layer")


def _experts(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    moe, ep_size = config.moe, config.parallel.expert_model_parallel_size
    if moe.num_experts == 0:
        if ep_size > 1:
            yield _error(
                "expert_model_parallel_size",
                ep_size,
                "there are no experts to split",
                "give --num-experts or set it to 1",
            )
        if moe.moe_shared_expert_intermediate_size:
            yield _error(
                "moe_shared_expert_intermediate_size",
                moe.moe_shared_expert_intermediate_size,
                "a shared expert stands beside routed experts, and there are none",
                "give --num-experts or set it to 0",
            )
        return
    if config.model.add_bias_linear:
        yield _error("add_bias_linear", "on", "routed experts have no biases", "give --disable-bias-linear")
    if moe.moe_router_topk > moe.num_experts:
        yield _error(
            "moe_router_topk",
            moe.moe_router_topk,
            f"exceeds --num-experts {moe.num_experts}",
            f"use at most {moe.num_experts}",
        )
    if moe.num_experts % ep_size:
        yield _error(
            "expert_model_parallel_size",
            ep_size,
            f"does not divide --num-experts {moe.num_experts}",
            "use a divisor of the number of experts",
        )
    if moe.moe_shared_expert_overlap and not moe.moe_shared_expert_intermediate_size:
        yield _error(
            "moe_shared_expert_overlap",
            "on",
            "there is no shared expert",
            "give --moe-shared-expert-intermediate-size or turn this off",
        )


def _learning_rate(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    optimizer, train_iters = config.optimizer, config.training.train_iters
    style = optimizer.lr_decay_style
    if optimizer.min_lr > optimizer.lr and style != "constant":
        yield _error(
            "min_lr", optimizer.min_lr, f"exceeds the peak --lr {optimizer.lr}", "lower --min-lr or raise --lr"
        )
    decay_iters, warmup = optimizer.lr_decay_iters, optimizer.lr_warmup_iters
    if decay_iters is not None and warmup > decay_iters:
        yield _error("lr_warmup_iters", warmup, f"exceeds --lr-decay-iters {decay_iters}", f"use at most {decay_iters}")
        return
    room = (decay_iters or train_iters) - warmup
    final = optimizer.lr_wsd_decay_iters
    if style == "WSD" and final is not None and final > max(room, 0):
        yield _error(
            "lr_wsd_decay_iters",
            final,
            f"does not fit into the {max(room, 0)} iterations after warmup",
            "shorten it or the warmup, or train longer",
        )


def _recompute(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    activation = config.activation
    num_layers = activation.recompute_num_layers
    if activation.recompute_method == "uniform" and num_layers not in (None, 1):
        yield _error(
            "recompute_num_layers",
            num_layers,
            "with --recompute-method uniform that many blocks would share one kept input; here each keeps its own",
            "give --recompute-method block to recompute the first blocks of a stage, or use 1",
        )
    if activation.recompute_method == "block" and num_layers is None:
        yield _error(
            "recompute_method",
            "block",
            "recomputes a number of blocks, and none is given",
            "give --recompute-num-layers",
        )
    yield from _offload_modules(config)
    yield from _recompute_modules(config)
    if activation.recompute_granularity in ("auto", "full") or activation.offload_modules:
        return
    for field, is_on in (
        ("enable_double_buffer", config.accelerator.enable_double_buffer),
        ("activation_offload", config.activation.activation_offload),
    ):
        if is_on:
            yield _error(
                field,
                "on",
                "block inputs leave the device only when blocks are recomputed from them",
                f"drop --recompute-granularity {activation.recompute_granularity}, or turn this off",
            )


def _recompute_modules(config: RunConfig) -> Iterator[ConfigError]:
    modules = config.activation.recompute_modules
    for module in modules:
        if module not in RECOMPUTE_MODULES:
            yield _error("recompute_modules", module, "no module of that name", f"use {', '.join(RECOMPUTE_MODULES)}")
    if config.activation.recompute_granularity == "selective" and not modules:
        yield _error("recompute_modules", "", "nothing would be recomputed", "name one, or drop selective recompute")
    for module in sorted(config.recomputed_modules):
        for region in set(config.activation.offload_modules) & OVERLAPPING_REGIONS.get(module, set()):
            yield _error(
                "recompute_modules",
                module,
                f"computes again what --offload-modules {region} keeps off the device",
                "recompute or offload it, not both",
            )


def _offload_modules(config: RunConfig) -> Iterator[ConfigError]:
    modules = config.activation.offload_modules
    for module in modules:
        if module not in OFFLOAD_REGIONS:
            yield _error("offload_modules", module, "no module of that name", f"use {', '.join(OFFLOAD_REGIONS)}")
    if modules and config.recompute and config.num_recomputed_blocks is None:
        yield _error(
            "offload_modules",
            " ".join(modules),
            "every block is recomputed, so no module keeps tensors for backward",
            "drop --recompute-granularity full, or recompute some blocks with --recompute-method block",
        )


def _offload_policy(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    if config.activation.offload_policy == "auto" and config.activation.offload_modules:
        yield _error(
            "offload_policy",
            "auto",
            "decides about the inputs of recomputed blocks, not about tensors of modules",
            "drop it, or --offload-modules",
        )


def _name(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    name = config.training.name
    if "/" in name or os.sep in name:
        yield _error(
            "name",
            name,
            "names a folder below runs/ and may not lead elsewhere",
            "leave path separators out, or choose the folder with --save",
        )


def _offload_folder(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    folder = config.activation.activation_offload_dir
    if folder is None or not config.offload:
        return
    existing = Path(folder)
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    reason = ""
    if not existing.is_dir():
        reason = f"{existing} is no folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        reason = f"{existing} is not writable"
    if reason:
        yield _error("activation_offload_dir", folder, reason, "give a writable folder on a fast local disk")


RULES: tuple[Rule, ...] = (
    _heads,
    _positions,
    _layer_patterns,
    _experts,
    *LAYOUT_RULES,
    _learning_rate,
    _recompute,
    _offload_policy,
    _name,
    _offload_folder,
)
"""All rules, most basic first."""


OVERLAPPING_REGIONS: dict[str, set[str]] = {
    "core_attn": {"attn_core"},
    "mlp": {"mlp_act"},
    "moe": {"mlp_act", "moe_act"},
    "moe_act": {"moe_act"},
}
"""Of each module that can be recomputed, what of it can be offloaded instead."""

OFFLOAD_FIELDS = (
    "activation_offload_dir",
    "activation_debug_poison",
    "offload_policy",
    "offload_num_layers",
    "offload_max_inflight",
    "offload_max_mb_per_s",
    "conservative_sync",
)
"""Fields of the activation section that say how offload works, not whether."""


def _position_table_bytes(config: RunConfig) -> int:
    """Memory of the fp32 tables of positions that nobody learns."""
    model = config.model
    num_positions = model.max_position_embeddings or config.data.seq_length
    widths = {"rope": int(model.head_dim * model.rotary_percent), "sinusoidal": model.hidden_size}
    return 4 * num_positions * widths.get(model.position_embedding_type, 0)


def _warnings(config: RunConfig, world_size: int, device_type: str) -> Iterator[str]:
    """Yield what works, but hardly as meant."""
    optimizer, training, accelerator = config.optimizer, config.training, config.accelerator
    if config.moe.num_experts == 0:
        plain = MoEConfig()
        changed = [field for field in MoEConfig.model_fields if getattr(config.moe, field) != getattr(plain, field)]
        if changed:
            yield f"{', '.join(map(flag_of, changed))}: no effect without --num-experts"
    if config.model.window_attn_skip_freq is not None and config.model.window_size == 0:
        yield "--window-attn-skip-freq: no effect without --window-size"
    if optimizer.lr_warmup_iters > training.train_iters:
        yield (
            f"--lr-warmup-iters={optimizer.lr_warmup_iters}: longer than the run of {training.train_iters} iterations, "
            "which never reaches the peak learning rate"
        )
    if optimizer.lr_wsd_decay_iters is not None and optimizer.lr_decay_style != "WSD":
        yield "--lr-wsd-decay-iters: no effect without --lr-decay-style WSD"
    if accelerator.buffer_size_mb and not accelerator.enable_double_buffer:
        yield "--double-buffer-size-mb: no effect without --double-buffer-ckpt"
    table_mb = _position_table_bytes(config) / 2**20
    if table_mb > config.cache.cache_limit_mb:
        yield (
            f"--cache-limit-mb={config.cache.cache_limit_mb}: tables of positions take {table_mb:.1f} MiB, so they are "
            f"built again for every micro-batch; use at least {math.ceil(table_mb)}, with --cache-tier host if that is "
            "too much for the device"
        )
    if config.cache.cache_tier == "host" and not accelerator.enable_metadata_cache:
        yield "--cache-tier=host: without --use-packed-cache every layer fetches its rows from the host on its own"
    plain_modules = ActivationConfig().recompute_modules
    if not config.recomputed_modules and config.activation.recompute_modules != plain_modules:
        yield "--recompute-modules: no effect without --recompute-granularity selective"
    if not config.recompute and config.activation.recompute_num_layers is not None:
        yield "--recompute-num-layers: no effect without recompute (--recompute-granularity full)"
    if not config.offload:
        plain = ActivationConfig()
        for field in OFFLOAD_FIELDS:
            if getattr(config.activation, field) != getattr(plain, field):
                yield f"{flag_of(field)}: no effect without --double-buffer-ckpt or --activation-offload"
    elif config.activation.offload_num_layers is not None and config.activation.offload_policy == "auto":
        yield "--offload-policy=auto: not used, --offload-num-layers says how many inputs leave"
    yield from layout_warnings(config, world_size)
    if training.precision == "bf16" and device_type == "cpu":
        yield (
            "--precision=bf16: CPUs without bf16 instructions multiply at a fraction of a GFLOP/s in it; "
            "use fp32 unless this is a small test"
        )
