"""Sharded weights: torch's ``fully_shard`` (FSDP2) on every block shell and on the rest of the model.

One block is one gather and one reduce-scatter per mesh: dense parameters on dp x cp, expert parameters on edp. What
tensor or expert parallelism has split becomes a DTensor on those axes first, so that the sharded parameter knows the
whole tensor, and checkpoints with it. Experts sit in their block's own FSDP unit: one inside the block might be
gathered once more in every recompute (see ``managed_block.py``). Replicas (HSDP) hold equal dense shards and sum them.

Precision: parameters, their gradients and the reduction are fp32; the gather casts to the compute dtype. A parameter
marked with ``keep_full_precision`` is left out when the two differ: it stays replicated and is summed after backward.

Gradients are reduced in every micro-batch: waiting for the last would keep unsharded gradients of the whole model, and
their memory is what this engine is chosen to save. Under a pipeline torch's schedule reduces once, after the last
backward. ZeRO stage 2 keeps gathered weights from forward to backward, stage 3 gathers them again; a true stage 1 does
not exist here (DeepSpeed has it).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from megatron_glue.parallel.engines.base import DataParallelEngine, fill_missing_gradients, keep_shard_specs
from megatron_glue.parallel.engines.flat_reducer import FlatReducer
from megatron_glue.parallel.engines.partial_sums import PartialSums
from megatron_glue.parallel.managed_block import model_parts
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
        zero_stage: 2 keeps gathered weights from forward to backward, 3 does not.
        shard_experts: Whether experts are sharded over edp. ``None``: if this torch can. Otherwise they stay whole on
            their ep rank and are summed over edp after backward.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: ParallelMesh,
        precision: Precision,
        *,
        zero_stage: int = 3,
        shard_experts: bool | None = None,
    ) -> None:
        self.module = self.model = model
        self.mesh = mesh
        is_own_mesh = mesh.ep_size * mesh.etp_size * mesh.tp_size * mesh.sizes["dp_replicate"] > 1
        can_shard_experts = HAS_PLACEMENT_RESULT or not is_own_mesh
        self._shards_experts = can_shard_experts if shard_experts is None else shard_experts
        experts = {param for param in model.parameters() if is_expert_parameter(param)}
        replicated = {p for p in model.parameters() if precision.is_mixed and keeps_full_precision(p)} - experts
        ignored = replicated | (set() if self._shards_experts else experts)
        _make_dtensors(model, mesh, ignored)
        self._reducers = [
            FlatReducer([p for p in model.parameters() if p.requires_grad and p in replicated], mesh.dp_cp_group),
            FlatReducer(
                [p for p in model.parameters() if p.requires_grad and p in experts and not self._shards_experts],
                mesh.edp_group,
            ),
        ]
        # cast_forward_inputs would rebuild the dataclasses that blocks are called with, and lose their caches.
        policy = MixedPrecisionPolicy(
            param_dtype=precision.compute_dtype, reduce_dtype=precision.master_dtype, cast_forward_inputs=False
        )
        options: dict[str, Any] = {
            "mesh": mesh.fsdp_mesh,
            "mp_policy": policy,
            "ignored_params": ignored,
            "shard_placement_fn": _Placement(mesh, self._shards_experts and is_own_mesh),
        }
        with keep_shard_specs(model):
            _shard_parts(model, zero_stage, options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                # gloo knows only sums; on NCCL it keeps a division from coming back.
                module.set_force_sum_reduction_for_comms(True)
                if hasattr(module, "set_reduce_scatter_unused_params"):
                    module.set_reduce_scatter_unused_params(True)
        self._partial_sums = PartialSums(self.gradient_parameters(), mesh)
        self._has_run = False

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Every micro-batch reduces: see the top of the file."""
        self._has_run = True
        return nullcontext()

    def begin_pipeline(self, num_micro_batches: int) -> None:
        """Torch's stages reduce after their last backward pass."""
        self._has_run = True

    def end_inference(self) -> None:
        """Free gathered weights: where they are kept for backward, they would stand in the place of the masters."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def finish_backward(self) -> None:
        """Sum what FSDP2 does not own and fill missing gradients."""
        for reducer in self._reducers:
            reducer.reduce()
        fill_missing_gradients(self.gradient_parameters())
        self._partial_sums.reduce()

    def reset(self) -> None:
        """Free gathered weights and forget an aborted pass."""
        # The call needs the state that the first forward creates, and torch 2.12.
        for part in model_parts(self.model):
            if self._has_run and hasattr(part, "reset_iter_state"):
                part.reset_iter_state()  # pyright: ignore[reportCallIssue]
        super().reset()

    def describe(self) -> str:
        """One line for the log."""
        mesh = self.mesh
        assert mesh.fsdp_mesh is not None
        experts = "sharded over edp" if self._shards_experts else "whole on each ep rank"
        replicas = f" in {mesh.sizes['dp_replicate']} replicas" if mesh.sizes["dp_replicate"] > 1 else ""
        num_shards = mesh.fsdp_mesh.size(-1)
        return f"data parallel: fsdp2, parameters sharded over {num_shards} ranks{replicas}, experts {experts}"


def _shard_parts(model: nn.Module, zero_stage: int, options: dict[str, Any]) -> None:
    """One FSDP unit per block, and one for the rest of each part."""
    for part in model_parts(model):
        for block in _blocks(part):
            fully_shard(block, reshard_after_forward=zero_stage == 3, **options)
        # Outside forward and backward every registered parameter is the sharded one, the root's too: after an
        # evaluation the default would leave gathered bf16 weights where a checkpoint expects the masters.
        fully_shard(part, reshard_after_forward=True, **options)
        for name in getattr(part, "forward_methods", ()):
            register_fsdp_forward_method(part, name)


def _blocks(part: nn.Module) -> list[nn.Module]:
    """Shells of the blocks of a part of a model."""
    blocks = getattr(part, "blocks", nn.ModuleList())
    return list(blocks.values()) if isinstance(blocks, nn.ModuleDict) else list(blocks)


class _Placement:
    """Tells ``fully_shard`` which dim of a parameter to split, and on which mesh: experts on edp, others on theirs."""

    def __init__(self, mesh: ParallelMesh, is_own_mesh: bool) -> None:
        assert mesh.expert_mesh is not None
        assert mesh.fsdp_mesh is not None
        self._num_shards = mesh.edp_size, mesh.fsdp_mesh.size(-1)
        self._expert_mesh = fsdp_common.FSDPMeshInfo(mesh.expert_mesh["edp"], shard_mesh_dim=0) if is_own_mesh else None

    def __call__(self, param: nn.Parameter) -> Any:
        is_expert = is_expert_parameter(param)
        local = param.to_local() if isinstance(param, DTensor) else param
        num_shards = self._num_shards[0 if is_expert else 1]
        # Few experts or heads per rank: split another dim, which FSDP2 wants to divide evenly, rather than leave ranks
        # empty.
        even = [dim for dim, size in enumerate(local.shape) if size % num_shards == 0]
        placement = Shard(even[0] if even else 0)
        if not is_expert or self._expert_mesh is None:
            return placement
        return fsdp_common.ShardPlacementResult(placement, self._expert_mesh)


def _make_dtensors(model: nn.Module, mesh: ParallelMesh, ignored: set[nn.Parameter]) -> None:
    """Replace each parameter that tensor or expert parallelism has split by a DTensor that shares its memory."""
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            spec = get_shard_spec(param)
            axes = tuple(axis for axis, _ in spec.shard_dims if mesh.axis_sizes[axis] > 1) if spec else ()
            if spec is None or not axes or param in ignored:
                continue
            if param not in replacements:
                root = mesh.expert_mesh if spec.is_expert else mesh.dense_mesh
                assert root is not None, "split parameters exist on more than one rank"
                whole = DTensor.from_local(param.detach(), root[axes], spec.placements(axes), run_check=False)
                replacements[param] = nn.Parameter(whole, requires_grad=param.requires_grad)
                set_shard_spec(replacements[param], spec)
            module.register_parameter(name, replacements[param])
