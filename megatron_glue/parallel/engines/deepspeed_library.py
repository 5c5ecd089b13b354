"""The one door to the DeepSpeed library: it is imported here, when a run asks for its engine, and nowhere else.

Also what DeepSpeed has to be told before it starts: which device this run computes on, that no kernel is to be
compiled, and that expert parameters are not everybody's.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from typing import Any

import torch
from torch import nn

from megatron_glue.config.environment import set_environment_default
from megatron_glue.config.errors import ConfigError
from megatron_glue.parallel.shard_spec import is_expert_parameter

logger = logging.getLogger(__name__)

EXPERT_GROUP_PREFIX = "ep_size_"
"""DeepSpeed names its groups of experts so."""


def load_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for a device.

    Args:
        device: Where this rank computes.

    Returns:
        The module ``deepspeed``.

    Raises:
        ConfigError: If it is not installed.
    """
    # Without the first it looks around for accelerators and takes a GPU where there is one; the second it insists on.
    set_environment_default("DS_ACCELERATOR", device.type)
    set_environment_default("LOCAL_RANK", str(device.index or 0))
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise ConfigError(
            "--data-parallel-engine",
            "deepspeed",
            f"DeepSpeed cannot be imported: {error}",
            "run pip install 'megatron_glue[deepspeed]', or use --data-parallel-engine fsdp2",
        ) from error
    accelerator = importlib.import_module("deepspeed.accelerator")
    if accelerator.get_accelerator().device_name() != device.type:
        # The library was loaded before, or the variable set otherwise.
        kind = importlib.import_module(f"deepspeed.accelerator.{device.type}_accelerator")
        accelerator.set_accelerator(getattr(kind, f"{device.type.upper()}_Accelerator")())
    # Its calls of older names, told once per call site and rank, are nothing that a user could change.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    _forbid_compilation(importlib.import_module("deepspeed.ops"))
    return deepspeed


def initialize(deepspeed: Any, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    """Start DeepSpeed on a model.

    Args:
        deepspeed: What :func:`load_deepspeed` returned.
        model: Changed in place.
        optimizer: Its parameters are replaced.
        config: DeepSpeed's configuration.

    Returns:
        DeepSpeed's engine.
    """
    printed = io.StringIO()
    # One of its optimizers prints how much memory is free, several times.
    with contextlib.redirect_stdout(printed):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    logger.debug("DeepSpeed printed: %s", printed.getvalue())
    return engine


def config_error_of_library() -> type[Exception]:
    """What DeepSpeed raises about its configuration, beside assertions and ``ValueError``."""
    return importlib.import_module("deepspeed.runtime.config").DeepSpeedConfigError


def mark_experts(model: nn.Module, ep_size: int) -> None:
    """Tell DeepSpeed which parameters differ between expert-parallel ranks.

    Its engine looks for modules of its own class ``MoE``, and for two attributes of their parameters. The marks alone
    are not enough, so an empty module of that class is added to the model; it has no parameters and nothing calls it.

    Args:
        model: The model, before ``deepspeed.initialize``.
        ep_size: Ranks that split the experts, more than 1. Every rank must call this, since groups are created.
    """
    moe_class = importlib.import_module("deepspeed.moe.layer").MoE
    name = f"{EXPERT_GROUP_PREFIX}{ep_size}"

    class ExpertMarker(moe_class):
        """An instance of DeepSpeed's class without anything of it."""

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.expert_group_name, self.num_experts, self.num_local_experts = name, ep_size, 1

        def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
            """The groups exist already."""

    importlib.import_module("deepspeed.comm").init_distributed()
    groups = importlib.import_module("deepspeed.utils.groups")
    if name not in groups._get_expert_parallel_group_dict():
        # Neighbours exchange tokens, as in our mesh (ep inside edp).
        groups._create_expert_and_data_parallel(ep_size)
    for param in model.parameters():
        if is_expert_parameter(param):
            param.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]
            param.group_name = name  # pyright: ignore[reportAttributeAccessIssue]
    model.add_module("deepspeed_experts", ExpertMarker())


def _forbid_compilation(operators: Any) -> None:
    """Keep DeepSpeed on a CPU from building its shared-memory collectives in the first run.

    The build takes minutes, and if it is interrupted it leaves a lock file for which every later run waits for ever.
    gloo serves instead. The table is internal: a version without it, or without this entry, builds as it likes.
    """
    operators_here = getattr(operators, "__compatible_ops__", None)
    if isinstance(operators_here, dict) and "deepspeed_shm_comm" in operators_here:
        operators_here["deepspeed_shm_comm"] = False
