"""Sharded weights: torch's ``fully_shard`` (FSDP2) on every block shell and on the rest of the model.

One block is one gather and one reduce-scatter per mesh: dense parameters on dp, expert parameters on edp. With expert
parallelism an expert parameter becomes a DTensor on ep first, so that the sharded parameter knows the whole tensor, and
checkpoints with it. Experts sit in their block's own FSDP unit: one inside the block might be gathered once more in
every recompute (see ``managed_block.py``).

Precision: parameters, their gradients and the reduction are fp32; the gather casts to the compute dtype. A parameter
marked with ``keep_full_precision`` is left out when the two differ: it stays replicated and is summed after backward.

Gradients are reduced in every micro-batch: waiting for the last would keep unsharded gradients of the whole model, and
their memory is what this engine is chosen to save.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from megatron_glue.parallel.engines.base import DataParallelEngine, fill_missing_gradients
from megatron_glue.parallel.engines.flat_reducer import FlatReducer
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.precision import Precision, keeps_full_precision
from megatron_glue.parallel.shard_spec import get_shard_spec, is_expert_parameter, set_shard_spec

try:  # torch 2.12 and later; documented with fully_shard, though it lives in a private module
    from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common

    HAS_PLACEMENT_RESULT = hasattr(fsdp_common, "ShardPlacementResult")
except ImportError:
    HAS_PLACEMENT_RESULT = False


class Fsdp2Engine(DataParallelEngine):
    """FSDP2 with one unit per block.

    Args:
        model: A model whose ``blocks`` are ``ManagedBlock`` shells.
        mesh: The run's mesh, with dp_size > 1.
        precision: Compute dtype.
        shard_experts: Whether experts are sharded over edp. ``None``: if this torch can. Otherwise they stay whole on
            their ep rank and are summed over edp after backward.
    """

    def __init__(
        self, model: nn.Module, mesh: ParallelMesh, precision: Precision, shard_experts: bool | None = None
    ) -> None:
        can_shard_experts = HAS_PLACEMENT_RESULT or mesh.ep_size == 1
        self._shards_experts = can_shard_experts if shard_experts is None else shard_experts
        self._mesh = mesh
        experts = {param for param in model.parameters() if is_expert_parameter(param)}
        replicated = {p for p in model.parameters() if precision.is_mixed and keeps_full_precision(p)} - experts
        ignored = replicated | (set() if self._shards_experts else experts)
        self._reducers = [
            FlatReducer([p for p in model.parameters() if p.requires_grad and p in replicated], mesh.dp_group),
            FlatReducer(
                [p for p in model.parameters() if p.requires_grad and p in experts and not self._shards_experts],
                mesh.edp_group,
            ),
        ]
        if self._shards_experts and mesh.ep_size > 1:
            _make_expert_dtensors(model, mesh)
        # cast_forward_inputs would rebuild the dataclasses that blocks are called with, and lose their caches.
        policy = MixedPrecisionPolicy(
            param_dtype=precision.compute_dtype, reduce_dtype=precision.master_dtype, cast_forward_inputs=False
        )
        options: dict[str, Any] = {"mesh": mesh.data_mesh, "mp_policy": policy, "ignored_params": ignored}
        if self._shards_experts and mesh.ep_size > 1:
            options["shard_placement_fn"] = _ExpertPlacement(mesh)
        blocks = getattr(model, "blocks", [])
        for block in list(blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks):
            fully_shard(block, **options)
        # Outside forward and backward every registered parameter is the sharded one, the root's too: after an
        # evaluation the default would leave gathered bf16 weights where a checkpoint expects the masters.
        fully_shard(model, reshard_after_forward=True, **options)
        for name in getattr(model, "forward_methods", ()):
            register_fsdp_forward_method(model, name)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                # gloo knows only sums; on NCCL it keeps a division from coming back.
                module.set_force_sum_reduction_for_comms(True)
                if hasattr(module, "set_reduce_scatter_unused_params"):
                    module.set_reduce_scatter_unused_params(True)
        self.module = self.model = model
        self._has_run = False

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Every micro-batch reduces: see the top of the file."""
        self._has_run = True
        return nullcontext()

    def finish_backward(self) -> None:
        """Sum what FSDP2 does not own and fill missing gradients."""
        for reducer in self._reducers:
            reducer.reduce()
        fill_missing_gradients(self.gradient_parameters())

    def reset(self) -> None:
        """Free gathered weights and forget an aborted pass."""
        # The call needs the state that the first forward creates, and torch 2.12.
        if self._has_run and hasattr(self.model, "reset_iter_state"):
            self.model.reset_iter_state()  # pyright: ignore[reportCallIssue]
        super().reset()

    def describe(self) -> str:
        """One line for the log."""
        experts = "sharded over edp" if self._shards_experts else "whole on each ep rank"
        return f"data parallel: fsdp2, parameters sharded over {self._mesh.dp_size} ranks, experts {experts}"


class _ExpertPlacement:
    """Tells ``fully_shard`` where each parameter goes: experts on edp, all others on its own mesh."""

    def __init__(self, mesh: ParallelMesh) -> None:
        assert mesh.expert_mesh is not None
        self._edp_size = mesh.edp_size
        self._mesh_info = fsdp_common.FSDPMeshInfo(mesh.expert_mesh["edp"], shard_mesh_dim=0)

    def __call__(self, param: nn.Parameter) -> Any:
        if not is_expert_parameter(param):
            return None
        local = param.to_local() if isinstance(param, DTensor) else param
        # Few experts per rank: split another dim, which FSDP2 wants to divide evenly, rather than leave ranks empty.
        even = [dim for dim, size in enumerate(local.shape) if size % self._edp_size == 0]
        return fsdp_common.ShardPlacementResult(Shard(even[0] if even else 0), self._mesh_info)


def _make_expert_dtensors(model: nn.Module, mesh: ParallelMesh) -> None:
    """Replace each local expert parameter by a DTensor over ep that shares its memory."""
    assert mesh.expert_mesh is not None
    ep_mesh = mesh.expert_mesh["ep"]
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            spec = get_shard_spec(param)
            if spec is None or not is_expert_parameter(param):
                continue
            whole = DTensor.from_local(param.detach(), ep_mesh, spec.placements(("ep",)), run_check=False)
            replacement = nn.Parameter(whole, requires_grad=param.requires_grad)
            set_shard_spec(replacement, spec)
            module.register_parameter(name, replacement)
