"""Runs the blocks of a model part and decides what of them is kept for backward.

Stands between the model and its blocks: the model calls ``run_block`` instead of the block. Three ways, each with the
same gradients bit for bit: keep everything (plain call), perhaps without chosen modules; keep the block's input and
recompute the rest; keep the input off the device too. The training step calls ``begin_step`` before the first
micro-batch, ``end_forward`` after each forward pass, and ``reset`` in its ``finally``.

One manager per model part and device; it is not shared between threads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_glue.activation.conservative_tier import ConservativeTier
from megatron_glue.activation.device_api import CudaDevice, has_integrated_memory, room_bytes
from megatron_glue.activation.disk_tier import DiskTier
from megatron_glue.activation.module_offload import ModuleTensors, run_offloaded
from megatron_glue.activation.offload_costs import OffloadCosts, costs_of
from megatron_glue.activation.offload_policy import OffloadDecision
from megatron_glue.activation.offloader import InputOffloader, OffloadedInput, ResidentInput
from megatron_glue.activation.pinned_tier import PinnedTier
from megatron_glue.activation.plan import ActivationPlan
from megatron_glue.activation.recompute import InputInMemory, run_recomputed
from megatron_glue.activation.selective import SelectiveRecompute
from megatron_glue.activation.statistics import ActivationStats, ReloadTimes, TimelineEvent
from megatron_glue.activation.tiers import Tier
from megatron_glue.types import ForwardContext


class ActivationManager:
    """The technique of a run, applied to one model part.

    Args:
        plan: What to do.
        device: Where the model part computes.
        tier: Where inputs go; None chooses pinned host memory on CUDA and the plan's folder elsewhere.

    Raises:
        ValueError: The disk tier has no folder, or the device has no tier or none with that bound.
        OSError: The folder cannot be written to.
    """

    def __init__(self, plan: ActivationPlan, device: torch.device | str, *, tier: Tier | None = None) -> None:
        self._plan = plan
        self._device = torch.device(device)
        self._offloader: InputOffloader | None = None
        self._share = plan.offload_share
        self._is_integrated = False
        if plan.offload:
            self._is_integrated = (
                has_integrated_memory(self._device) if plan.integrated_memory is None else plan.integrated_memory
            )
            num_buffers = 2 if plan.double_buffer and not self._is_integrated else 1
            tier = tier or _choose_tier(plan, self._device)
            self._offloader = InputOffloader(
                plan, ConservativeTier(tier) if plan.conservative_sync else tier, num_buffers
            )

    def run_block(
        self, block: nn.Module, x_TD: Tensor, context: ForwardContext, *, position: int = 0, is_last: bool = False
    ) -> Tensor:
        """Run one block.

        Args:
            block: Called as ``block(x_TD, context)``: once, and again in backward if the plan says so.
            x_TD: Its input, [T, D] on this manager's device. Nobody may write to it before backward.
            context: The micro-batch. Blocks of one micro-batch run in order; several may be in flight.
            position: Number of the block in its model part, for a plan that recomputes some of them.
            is_last: Whether it is the last of its model part. Backward wants its input first, so it stays where it is
                unless another micro-batch is in flight, whose backward hides the copies.

        Returns:
            The block's output.

        Raises:
            OSError: The tier is full or cannot be written.
        """
        is_recomputed = self._is_recomputed(position)
        modules = self._plan.recompute_modules
        if not (is_recomputed or modules or self._plan.offload_modules) or not torch.is_grad_enabled():
            return block(x_TD, context)
        is_nested = context.decisions is not None or context.is_recompute
        is_nested |= context.saved_tensor_regions is not None or context.selective is not None
        if is_nested or not (x_TD.requires_grad or any(weight.requires_grad for weight in block.parameters())):
            return block(x_TD, context)
        if modules and not is_recomputed:
            context = replace(context, selective=SelectiveRecompute(modules, self._plan.preserve_rng))
            if not self._plan.offload_modules:
                return block(x_TD, context)
        if self._offloader is None or self._is_off:
            return run_recomputed(block, [x_TD], context, [InputInMemory(x_TD)], self._plan.preserve_rng)
        if not is_recomputed:
            return self._run_with_modules_offloaded(block, x_TD, context)
        kept = self._keep(self._offloader, x_TD, context, position, is_last)
        began = self._offloader.statistics.begin_forward()
        y_TD = run_recomputed(block, [x_TD], context, [kept], self._plan.preserve_rng)
        self._offloader.statistics.end_forward(kept.call, began)
        return y_TD

    def _keep(
        self, offloader: InputOffloader, x_TD: Tensor, context: ForwardContext, position: int, is_last: bool
    ) -> OffloadedInput | ResidentInput:
        """Send the input of a recomputed block away, or let it stay."""
        stays = self._share is not None and not self._share.leaves(position)
        if stays or (is_last and offloader.is_wanted_first(context.micro_batch)):
            return offloader.keep(x_TD, context.micro_batch)
        return offloader.store(x_TD, context.micro_batch)

    def _run_with_modules_offloaded(self, block: nn.Module, x_TD: Tensor, context: ForwardContext) -> Tensor:
        assert self._offloader is not None
        plan, statistics = self._plan, self._offloader.statistics
        call = ModuleTensors(self._offloader, plan.offload_modules, list(block.parameters()), plan.least_offload_bytes)
        began = statistics.begin_forward()
        y_TD = run_offloaded(block, x_TD, context, call)
        if call.claim is not None:
            statistics.end_forward(call.claim.call, began)
        return y_TD

    def _is_recomputed(self, position: int) -> bool:
        limit = self._plan.num_recomputed
        return self._plan.recompute and (limit is None or position < limit)

    def begin_step(self) -> None:
        """Start an optimizer step: nothing of an earlier one is left."""
        if self._offloader is not None:
            self._offloader.begin_step(is_closed=self._is_off)

    def start_observing(self) -> None:
        """Keep the begin and end of everything until ``stop_observing``; figures go on as they are."""
        if self._offloader is not None:
            self._offloader.statistics.start_observing()

    def stop_observing(self) -> OffloadCosts:
        """What copies and blocks cost since ``start_observing``. The host waits for the device."""
        if self._offloader is None:
            return OffloadCosts()
        return costs_of(
            self._offloader.statistics.stop_observing(),
            input_bytes=self._offloader.input_bytes,
            total_bytes=self._offloader.stats().requested_bytes,
            room_bytes=room_bytes(self._device),
            is_integrated=self._is_integrated,
        )

    def apply(self, decision: OffloadDecision) -> None:
        """Offload as decided from the next step on. Call it between two steps, when nothing is stored."""
        if self._offloader is None:
            return
        assert self.num_tracked_inputs == 0, "a step is under way"
        self._share = decision.share
        if decision.num_leaving:
            self._offloader.resize(decision.num_buffers)
        else:
            self._offloader.close()

    def repeat_step(self) -> None:
        """Count what follows the next ``begin_step`` into the present step: it is a repetition."""
        if self._offloader is not None:
            self._offloader.statistics.repeat_step()

    def end_forward(self) -> None:
        """Forward of a micro-batch is done: start on the input that backward needs first."""
        if self._offloader is not None:
            self._offloader.prefetch_first()

    def reset(self) -> None:
        """Drop everything that is kept off the device, also after an exception in forward or backward."""
        if self._offloader is not None:
            self._offloader.reset()

    def stats(self) -> ActivationStats:
        """Figures since the last ``reset_stats``. The host waits for the device: call it on logging steps."""
        return ActivationStats() if self._offloader is None else self._offloader.stats()

    def step_times(self, last_steps: int | None = None) -> list[ReloadTimes]:
        """Times of each step since the last ``reset_stats``, empty without offload. The host waits for the device.

        Args:
            last_steps: Only the newest N steps; ``None``: all.
        """
        return [] if self._offloader is None else self._offloader.statistics.step_times(last_steps)

    def timeline(self) -> list[TimelineEvent]:
        """Copies, waits and blocks since the last reset, if the plan or ``start_timeline`` asked for them."""
        return [] if self._offloader is None else self._offloader.statistics.timeline()

    def start_timeline(self) -> None:
        """Set all figures to zero and keep the begin and end of everything from here on."""
        if self._offloader is not None:
            self._offloader.statistics.start_timeline()

    def reset_stats(self) -> None:
        """Set all figures to zero."""
        if self._offloader is not None:
            self._offloader.statistics.reset()

    @property
    def num_tracked_inputs(self) -> int:
        """Inputs that are off the device now."""
        return 0 if self._offloader is None else self._offloader.num_tracked

    @property
    def _is_off(self) -> bool:
        """Whether it was decided that no input leaves."""
        return self._share is not None and self._share.num_leaving == 0

    def close(self) -> None:
        """Free memory, files and threads. Idempotent."""
        if self._offloader is not None:
            self._offloader.close()

    def describe(self) -> str:
        """Say in one line what was chosen. Known in full after the first forward, which shows the size of inputs."""
        if not self._plan.recompute:
            recomputed = ", ".join(sorted(self._plan.recompute_modules))
            again = f"those of {recomputed} recomputed, others " if recomputed else ""
            if self._offloader is None:
                return f"activations: {again}kept"
            modules = ", ".join(sorted(self._plan.offload_modules))
            return f"activations: {again}kept, those of {modules} offloaded to {self._offloader.describe()}"
        some = "" if self._plan.num_recomputed is None else f" in the first {self._plan.num_recomputed} blocks"
        if self._offloader is None:
            return f"activations: recomputed{some}, block inputs kept on the device"
        if self._is_off:
            return f"activations: recomputed{some}, offload is off, block inputs stay on the device"
        share = self._share
        which = "block inputs" if share is None else f"inputs of {share.num_leaving} of {share.num_blocks} blocks"
        line = f"activations: recomputed{some}, {which} offloaded to {self._offloader.describe()}"
        if self._plan.double_buffer and self._is_integrated:
            line += " (the device shares the host's memory, so there is no copy to hide)"
        return line


def _choose_tier(plan: ActivationPlan, device: torch.device) -> Tier:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        if plan.max_bytes_per_s:
            raise ValueError("max_bytes_per_s: copies of a CUDA device run at the speed of the bus; use max_inflight=1")
        return PinnedTier(CudaDevice(torch.device("cuda", index)), plan.poison, plan.max_inflight)
    if device.type != "cpu":
        raise ValueError(f"offload=True: no tier for device {device}; it works on cuda and cpu")
    if plan.offload_dir is None:
        raise ValueError("offload_dir=None: a machine without an accelerator offloads to disk and needs a folder")
    return DiskTier(plan.offload_dir, max_inflight=plan.max_inflight, max_bytes_per_s=plan.max_bytes_per_s)
