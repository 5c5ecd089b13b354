"""Where DeepSpeed keeps this rank's share of the master weights and moments, for each kind of its optimizers.

ZeRO lays the parameters of a group end to end (stages 1 and 2) or cuts each into equal shares (stage 3), and gives
every rank one flat fp32 tensor per group. A :class:`Partition` says which range of which parameter lies where in it.

These are inner parts of DeepSpeed, read as its own checkpoints read them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_glue.parallel.precision import keeps_full_precision, set_unrounded
from megatron_glue.parallel.shard_spec import is_expert_parameter


@dataclass(frozen=True, eq=False)
class Partition:
    """This rank's range of one parameter.

    Attributes:
        param: The parameter, as the model holds it.
        flat: fp32, one dim: all that this rank updates of a group. It is what the torch optimizer knows.
        start: First element of the range in the flattened parameter.
        position: Where it lies in ``flat``.
        length: Its elements; 0 if this rank has none of the parameter.
    """

    param: nn.Parameter
    flat: Tensor
    start: int = 0
    position: int = 0
    length: int = 0

    def of(self, flat: Tensor) -> Tensor:
        """The parameter's range of a tensor that is laid out like ``self.flat``; shares its memory."""
        return flat.detach().narrow(0, self.position, self.length)


class ZeroStorage:
    """Stages 1 and 2: the parameters of a group end to end, cut into one part per rank.

    Args:
        optimizer: ``engine.optimizer``.
        group: The data-parallel ranks.
    """

    def __init__(self, optimizer: Any, group: ProcessGroup) -> None:
        self.optimizer = optimizer
        self._group = group
        self._unrounded: list[tuple[Partition, Tensor]] = []

    def partitions(self) -> Iterator[Partition]:
        """Yield one entry for every trainable parameter, in the same order on all ranks."""
        yield from _linked(self.optimizer.bit16_groups, self.optimizer.single_partition_of_fp32_groups)

    def grad_norm(self) -> Tensor:
        """The norm of all gradients, as the next step will compute it; infinite if it is not a number. Collective."""
        return self.optimizer.scaled_global_norm()

    def refresh_weights(self) -> None:
        """Copy the master weights into the weights that the model computes with. Collective."""
        self.optimizer.update_lp_params()

    def keep_unrounded(self) -> None:
        """Hand parameters that layers read in fp32 to them as they are, where weights are bf16. Collective."""
        for part in self.partitions():
            if keeps_full_precision(part.param) and part.param.dtype != part.flat.dtype:
                assert not is_expert_parameter(part.param), "experts are not the same on all data-parallel ranks"
                shape = getattr(part.param, "ds_shape", part.param.shape)
                values = torch.empty(shape, dtype=part.flat.dtype, device=part.flat.device)
                self._unrounded.append((part, values))
                set_unrounded(part.param, values)
        self.refresh_unrounded()

    @torch.no_grad()
    def refresh_unrounded(self) -> None:
        """Bring those values up to date after an update: one collective, of a few small parameters."""
        if not self._unrounded:
            return
        flat = torch.cat([torch.zeros_like(values).flatten() for _, values in self._unrounded])
        pieces = flat.split([values.numel() for _, values in self._unrounded])
        for (part, _), piece in zip(self._unrounded, pieces, strict=True):
            piece[part.start : part.start + part.length] = part.of(part.flat)
        dist.all_reduce(flat, group=self._group)
        for (_, values), piece in zip(self._unrounded, pieces, strict=True):
            values.copy_(piece.view_as(values))

    def drop_gradients(self) -> None:
        """Forget what was accumulated, as a step does."""
        self.optimizer.zero_grad(set_to_none=True)
        for gradients in (self.optimizer.averaged_gradients, self.optimizer.all_grad_tensors):
            for index in gradients:
                gradients[index] = None
        self.optimizer.micro_step_id = -1


class Bf16Storage(ZeroStorage):
    """Stage 1 with bf16 weights: whole fp32 gradients on every rank, masters and moments cut as above."""

    def partitions(self) -> Iterator[Partition]:
        """Yield one entry for every trainable parameter."""
        yield from _linked(self.optimizer.bf16_groups, self.optimizer.fp32_groups_flat_partition)

    def grad_norm(self) -> Tensor:
        """The norm of all gradients. Collective."""
        from_library = _library_functions()
        dense, experts = self.optimizer.get_grads_for_norm()
        norm = from_library.get_global_norm_of_tensors(input_tensors=dense, mpu=None, norm_type=2)
        if self.optimizer.has_moe_layers:
            norm = from_library.get_norm_with_moe_layers(norm, mpu=None, expert_tensors=experts, norm_type=2)
        return torch.as_tensor(norm, dtype=torch.float32, device=dense[0].device)

    def drop_gradients(self) -> None:
        """Forget what was accumulated."""
        self.optimizer.zero_grad(set_to_none=True)


class ShardedStorage(ZeroStorage):
    """Stage 3: every parameter cut into equal shares."""

    def partitions(self) -> Iterator[Partition]:
        """Yield one entry for every trainable parameter."""
        optimizer = self.optimizer
        for index, group in enumerate(optimizer.fp16_groups):
            for param in group:
                group_index, position, share = optimizer.grad_position[optimizer.get_param_id(param)]
                assert group_index == index
                start = share * dist.get_rank(self._group)
                length = max(0, min(share, param.ds_numel - start))
                yield Partition(param, optimizer.fp32_partitioned_groups_flat[index], start, position, length)

    def grad_norm(self) -> Tensor:
        """The norm of all gradients. Collective."""
        return _library_functions().combine_grad_norm_groups(self.optimizer._get_norm_groups())

    def refresh_weights(self) -> None:
        """Copy masters into this rank's shares of the weights, and gather those that are kept whole. Collective."""
        optimizer = self.optimizer
        optimizer._partition_all_parameters()
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def drop_gradients(self) -> None:
        """Forget what was accumulated: the next micro-batch overwrites it."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.averaged_gradients = {}


def storage_of(optimizer: Any, group: ProcessGroup) -> ZeroStorage:
    """Choose by the class of ``engine.optimizer``.

    Args:
        optimizer: The optimizer.
        group: The data-parallel ranks.

    Returns:
        Its storage.

    Raises:
        AssertionError: For a class that this package has not been tried with.
    """
    kinds = {
        "DeepSpeedZeroOptimizer": ZeroStorage,
        "BF16_Optimizer": Bf16Storage,
        "DeepSpeedZeroOptimizer_Stage3": ShardedStorage,
    }
    name = type(optimizer).__name__
    assert name in kinds, f"DeepSpeed made a {name}, which this package does not know"
    return kinds[name](optimizer, group)


def _linked(groups: Any, flats: Any) -> Iterator[Partition]:
    """What DeepSpeed wrote on the parameters of stages 1 and 2."""
    for group, flat in zip(groups, flats, strict=True):
        for param in group:
            mapping = param._hp_mapping
            if mapping is None:
                yield Partition(param, flat)
                continue
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield Partition(param, flat, here.start, there.start, here.numel)


def _library_functions() -> Any:
    """DeepSpeed's own functions beside the optimizer, without importing the library by name."""
    return importlib.import_module("deepspeed.runtime.utils")
