"""DeepSpeed as the data-parallel engine: ZeRO stages 0 to 3 around the model and the run's AdamW.

DeepSpeed takes model and optimizer together, so it starts in :meth:`DeepSpeedEngine.attach_optimizer`. It reduces,
cuts, clips and updates; what is common to all engines stays ours: the loss is divided before backward, the schedule
sets the learning rate, and checkpoints have our format.

Gradients are sums, as in every engine. Stages 0 to 2 are told to sum. Stage 3 divides by the number of ranks, so there
the loss is multiplied by it: exact where it is a power of two, one rounding per element otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.parallel.agreement import together
from megatron_glue.parallel.engines.base import DataParallelEngine, fill_missing_gradients
from megatron_glue.parallel.engines.deepspeed_config import FLAG, DeepSpeedRun, build_config
from megatron_glue.parallel.engines.deepspeed_library import (
    EXPERT_GROUP_PREFIX,
    config_error_of_library,
    initialize,
    load_deepspeed,
    mark_experts,
)
from megatron_glue.parallel.engines.deepspeed_storage import ZeroStorage, storage_of
from megatron_glue.parallel.flat_range import FlatRange, set_master
from megatron_glue.parallel.gather import gather_full_tensors
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import is_expert_parameter


class DeepSpeedEngine(DataParallelEngine):
    """DeepSpeed over dp, experts over edp.

    Args:
        model: Every rank built it alike, fp32, on its device.
        mesh: The run's mesh, with dp_size > 1 and no other axis than ep.
        run: What the run decided.

    Raises:
        ConfigError: If DeepSpeed is not installed, or the layout or its file asks for what this engine cannot do.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh, run: DeepSpeedRun) -> None:
        _refuse_other_axes(mesh)
        if run.zero_stage == 3 and any(is_expert_parameter(param) for param in model.parameters()):
            raise ConfigError(
                flag_of("zero_stage"),
                3,
                "DeepSpeed cannot split a model with experts at this stage",
                "use --zero-stage 2, or --data-parallel-engine fsdp2",
            )
        self._run = run
        self._config = build_config(run)
        self._library = load_deepspeed(_device_of(model))
        self._engine: Any = None
        self._storage: ZeroStorage | None = None
        self._optimizer: Any = None
        self.mesh = mesh
        # Until the optimizer arrives there is only the model.
        self.module = self.model = model

    def attach_optimizer(self, optimizer: Any) -> Any:
        """Give model and optimizer to DeepSpeed.

        Args:
            optimizer: The run's ``GuardedAdamW``.

        Returns:
            The same in stage 0, where every rank updates all weights; else one that updates this rank's part.

        Raises:
            ConfigError: If DeepSpeed refuses its configuration.
        """
        torch_optimizer = optimizer.torch_optimizer
        zero_stage = self._run.zero_stage
        if self.mesh.ep_size > 1:
            mark_experts(self.model, self.mesh.ep_size)
        if zero_stage > 0:
            # Moments belong to the parts that DeepSpeed is about to cut.
            torch_optimizer.state.clear()
            if self.mesh.ep_size > 1:
                torch_optimizer.param_groups[:] = _split_experts(torch_optimizer.param_groups, self.mesh.ep_size)
        # DeepSpeed makes its masters from weights that it has rounded to bf16. Ours were never rounded.
        rounds = self._run.has_low_precision_weights
        exact = {param: param.data for param in self.gradient_parameters()} if rounds else {}
        self._engine = self._initialize(torch_optimizer)
        self.module = self._engine
        if zero_stage == 0:
            optimizer.run_update = self._engine.step
            return optimizer
        self._storage = storage_of(self._engine.optimizer, self.mesh.groups["dp"])
        for part in self._storage.partitions():
            own = part.of(part.flat)
            if exact:
                own.copy_(exact[part.param].flatten().narrow(0, part.start, part.length))
            set_master(part.param, FlatRange(own, part.start))
        self._storage.keep_unrounded()
        if zero_stage == 3:
            for name in getattr(self.model, "forward_methods", ()):
                setattr(self.model, name, _as_forward(self.model, getattr(self.model, name)))
        self._optimizer = optimizer.under_zero(self._engine, self._storage)
        return self._optimizer

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Tell DeepSpeed which micro-batch ends the step."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        yield

    def backward(self, loss: Tensor) -> None:
        """Run backward and what DeepSpeed reduces behind it."""
        if self._run.zero_stage == 3:
            loss = loss * self.mesh.dp_size
        self._engine.backward(loss, scale_wrt_gas=False)

    def finish_backward(self) -> None:
        """DeepSpeed has reduced already; in stage 0 missing gradients are filled."""
        if self._storage is None:
            fill_missing_gradients(self.gradient_parameters())

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Measure the norm; DeepSpeed clips by it in the step.

        Args:
            max_norm: Largest norm; 0 measures only.

        Returns:
            The norm before clipping; infinite if it is not a number.
        """
        if self._storage is None:
            return super().clip_gradients(max_norm)
        self._storage.optimizer.clip_grad = max_norm
        norm = self._storage.grad_norm()
        return torch.where(norm < 0, torch.full_like(norm, torch.inf), norm)

    def full_gradients(self) -> dict[str, Tensor]:
        """Every gradient as one whole CPU tensor by global name, on every rank, before clipping."""
        gradient_of = self._library.utils.safe_get_full_grad
        named = [(name, param) for name, param in self.model.named_parameters() if param.requires_grad]
        return gather_full_tensors(((name, param, gradient_of(param)) for name, param in named), self.mesh)

    def after_load(self) -> None:
        """Take over what a checkpoint was read into: counters, and master weights into those that the model reads."""
        if self._storage is not None:
            # Counters differ between ranks: one that refuses them must not leave the others in what follows.
            together(self._optimizer.finish_load, self.mesh.world_group)
            self._storage.refresh_weights()
            self._storage.refresh_unrounded()

    def reset(self) -> None:
        """Drop all gradients. What an aborted backward left in DeepSpeed's buckets is not forgotten."""
        if self._storage is None:
            self.model.zero_grad(set_to_none=True)
        else:
            self._storage.drop_gradients()

    def num_local_parameters(self) -> int:
        """In stage 3 this rank's shares of the weights, else all of them."""
        if self._storage is None or self._run.zero_stage < 3:
            return super().num_local_parameters()
        return sum(part.length for part in self._storage.partitions())

    def describe(self) -> str:
        """One line for the log."""
        what = ("nothing", "optimizer states", "optimizer states and gradients", "weights, gradients and moments")
        file = "" if self._run.config_path is None else f", with {self._run.config_path}"
        return (
            f"data parallel: deepspeed {self._library.__version__}, ZeRO stage {self._run.zero_stage}, "
            f"{what[self._run.zero_stage]} cut over {self.mesh.dp_size} ranks{file}"
        )

    def _initialize(self, torch_optimizer: torch.optim.Optimizer) -> Any:
        try:
            return initialize(self._library, self.model, torch_optimizer, self._config)
        except (AssertionError, ValueError, config_error_of_library()) as error:
            if self._run.config_path is None:
                raise
            reason = f"DeepSpeed refuses it: {' '.join(str(error).split())}"
            raise ConfigError(FLAG, self._run.config_path, reason, "correct the file") from error


def _refuse_other_axes(mesh: ParallelMesh) -> None:
    for field, size in (
        ("tensor_model_parallel_size", mesh.tp_size),
        ("pipeline_model_parallel_size", mesh.pp_size),
        ("context_parallel_size", mesh.cp_size),
        ("expert_tensor_parallel_size", mesh.etp_size),
    ):
        if size > 1:
            raise ConfigError(
                flag_of(field),
                size,
                "the deepspeed engine knows data and expert parallelism only",
                "set it to 1, or use --data-parallel-engine ddp or fsdp2",
            )


def _split_experts(groups: list[dict[str, Any]], ep_size: int) -> list[dict[str, Any]]:
    """Give expert parameters groups of their own, named as DeepSpeed wants them."""
    split: list[dict[str, Any]] = []
    for group in groups:
        experts = [param for param in group["params"] if is_expert_parameter(param)]
        others = [param for param in group["params"] if not is_expert_parameter(param)]
        if others:
            split.append({**group, "params": others})
        if experts:
            split.append({**group, "params": experts, "name": f"{EXPERT_GROUP_PREFIX}{ep_size}", "moe": True})
    return split


def _as_forward(model: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method under the hooks that stage 3 has put around ``forward``: they gather the weights."""

    def run(*args: Any, **kwargs: Any) -> Any:
        assert "forward" not in vars(model), f"{method} runs inside another method"
        model.forward = method
        try:
            return model(*args, **kwargs)
        finally:
            del model.forward

    return run


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
