"""What a run is about to do, said before its first step: each optimisation with its state, its reason and its source.

From the configuration alone, so that ``--dry-run`` says the same; what only the device knows comes as an argument. The
same goes into ``env.json`` (``run_environment.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_glue.config.sections import RunConfig


@dataclass(frozen=True)
class Optimisation:
    """One technique of the run.

    Attributes:
        name: As users know it.
        is_on: Whether it works in this run.
        reason: What that means, or why it does not work although it was asked for.
        source: Where the deciding value came from.
    """

    name: str
    is_on: bool
    reason: str
    source: str

    def describe(self) -> str:
        """One line for the log."""
        return f"optimisation {self.name}: {'on' if self.is_on else 'off'}, {self.reason} ({self.source})"


def optimisations(
    config: RunConfig, provenance: Mapping[str, str], *, is_memory_shared: bool = False
) -> list[Optimisation]:
    """List the three optimisations of the accelerator block and the techniques beside them.

    Args:
        config: A validated configuration.
        provenance: Field name -> where its value came from.
        is_memory_shared: Whether the device shares the host's memory.

    Returns:
        All of them, off ones too.
    """
    return [
        Optimisation(name, is_on, reason, provenance.get(field, "default"))
        for name, is_on, reason, field in [*_switched(config, is_memory_shared), *_beside(config)]
    ]


_Row = tuple[str, bool, str, str]


def _switched(config: RunConfig, is_memory_shared: bool) -> Iterator[_Row]:
    """Yield the three that ``--no-accelerator`` turns off."""
    accelerator = config.accelerator
    is_cached = accelerator.enable_metadata_cache
    reason = "built once per micro-batch for all layers" if is_cached else "built anew in every layer"
    yield "packed-metadata cache", is_cached, f"metadata is {reason}", "enable_metadata_cache"
    is_double = accelerator.enable_double_buffer
    reason = "offloaded inputs come back through two buffers, beside compute"
    if not is_double:
        reason = "offloaded inputs come back one by one" if config.offload else "no input is offloaded for it"
    elif is_memory_shared:
        is_double, reason = False, "the device shares the host's memory, so there is no copy to hide"
    yield "double-buffered reload", is_double, reason, "enable_double_buffer"
    is_one_pass = accelerator.enable_grouped_index and config.moe.num_experts > 0
    reason = "one counting pass gives permutation, offsets and splits"
    if config.moe.num_experts == 0:
        reason = "the model has no experts"
    elif not is_one_pass:
        reason = "one mask per expert"
    yield "one-pass MoE grouping", is_one_pass, reason, "enable_grouped_index"


def _beside(config: RunConfig) -> Iterator[_Row]:
    """Yield what has switches of its own."""
    activation, moe, parallel = config.activation, config.moe, config.parallel
    is_recomputed = config.recompute or bool(config.recomputed_modules)
    reason = "blocks keep what backward needs"
    if config.recompute:
        reason = "blocks run again in backward"
    elif is_recomputed:
        reason = f"{', '.join(sorted(config.recomputed_modules))} of each block run again in backward"
    is_implied = activation.recompute_granularity == "auto" and not activation.activation_offload
    yield (
        "recompute",
        is_recomputed,
        reason,
        "enable_double_buffer" if is_implied and is_recomputed else "recompute_granularity",
    )
    reason = "activations stay on the device"
    field = "activation_offload"
    if config.offload:
        reason = "block inputs leave the device between forward and backward"
        if activation.offload_modules:
            reason, field = f"tensors of {', '.join(activation.offload_modules)} leave the device", "offload_modules"
        elif not activation.activation_offload:
            field = "enable_double_buffer"
    yield "activation offload", config.offload, reason, field
    is_split = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size > 1
    if moe.num_experts and is_split:
        num_chunks = moe.moe_overlap_chunks
        reason = f"rows are exchanged for {num_chunks} group(s) of experts in turn"
        yield "exchanges beside experts", num_chunks > 1, reason, "moe_overlap_chunks"
        if moe.moe_shared_expert_intermediate_size:
            is_beside = moe.moe_shared_expert_overlap
            reason = f"it is computed {'while rows travel' if is_beside else 'before rows are sent'}"
            yield "shared expert beside exchanges", is_beside, reason, "moe_shared_expert_overlap"
    is_async = config.training.async_save
    reason = "written beside training" if is_async else "training waits for them"
    yield "checkpoints in the background", is_async, reason, "async_save"
