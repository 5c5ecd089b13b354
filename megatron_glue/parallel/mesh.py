"""Which rank does what: the mesh of ranks, built once and passed explicitly.

Three views of the same ranks. Tokens are split over (pp, dp, cp, tensor); dense parameters live on
(pp, dp_replicate, fsdp, tp, kv_copy), experts on (pp, edp, ep, etp), where etp and ep are innermost, so that the ranks
that exchange tokens are neighbours. All views cut the ranks of one pipeline stage; axes of size 1 are part of them.

A tensor-parallel group is the two axes tp and kv_copy together: with fewer KV heads than ranks, tp counts the ranks
that hold different KV heads and kv_copy those that hold the same one; otherwise kv_copy is 1. The ranks that see
different tokens of one parameter, dp and cp, are cut into dp_replicate replicas of fsdp shards.

Layers never see this object. They get only the process group they use, and ``None`` stands for a group of one, so that
a model on one process is plain torch. There are no getters and no module state here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.layout_rules import world_problems
from megatron_glue.config.sections import ParallelConfig

TOKEN_AXES: tuple[str, ...] = ("pp", "dp", "cp", "tensor")
DENSE_AXES: tuple[str, ...] = ("pp", "dp_replicate", "fsdp", "tp", "kv_copy")
EXPERT_AXES: tuple[str, ...] = ("pp", "edp", "ep", "etp")

_MERGED_TOKEN_AXES: dict[str, tuple[str, ...]] = {
    "dp_cp": ("dp", "cp"),
    "tp_cp": ("cp", "tensor"),
    "stage": ("dp", "cp", "tensor"),
}
_MERGED_EXPERT_AXES: dict[str, tuple[str, ...]] = {"ep_etp": ("ep", "etp")}
"""Groups over several axes of one view."""


@dataclass(frozen=True, eq=False)
class ParallelMesh:
    """Sizes, this rank's coordinates, device meshes and process groups. Build it with :meth:`build`.

    Sizes and ranks exist for every kind of parallelism; a group is ``None`` where its size is 1.

    Attributes:
        world_size: All ranks.
        rank: This rank among all.
        sizes: Ranks along each axis of all views and in each merged group (``dp``, ``tensor``, ``stage``, ...).
        ranks: This rank's index along each of them.
        groups: Process group of each of them that is larger than 1.
        sequence_parallel: Whether tensor-parallel ranks split the tokens of the residual stream.
        dense_mesh: Device mesh over ``DENSE_AXES``; ``None`` in a world of one.
        expert_mesh: Device mesh over ``EXPERT_AXES``; ``None`` in a world of one.
        embedding_group: First and last stage, at the same place in both; ``None`` on other stages and without pipeline.
    """

    world_size: int = 1
    rank: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    sequence_parallel: bool = False
    dense_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    embedding_group: ProcessGroup | None = None

    @classmethod
    def build(cls, parallel: ParallelConfig, device_type: str, num_kv_heads: int | None = None) -> ParallelMesh:
        """Lay the ranks of the running process group out; without one, the world is this process alone.

        Args:
            parallel: Sizes of the axes.
            device_type: ``cpu`` or ``cuda``: where collectives of the mesh work.
            num_kv_heads: KV heads of the model, where tensor-parallel ranks may outnumber them.

        Returns:
            The mesh. It creates process groups, so every rank must call this.

        Raises:
            ConfigError: If the sizes do not divide the world or each other.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        token_sizes, dense_sizes, expert_sizes = axis_sizes_of(parallel, world_size, num_kv_heads)
        if world_size == 1:
            return cls()
        lines: dict[str, DeviceMesh] = {}
        meshes: list[DeviceMesh] = []
        for axis_sizes, merged in (
            (token_sizes, _MERGED_TOKEN_AXES),
            (dense_sizes, {}),
            (expert_sizes, _MERGED_EXPERT_AXES),
        ):
            view = init_device_mesh(device_type, tuple(axis_sizes.values()), mesh_dim_names=tuple(axis_sizes))
            lines |= {axis: view[axis] for axis in axis_sizes}
            lines |= {name: view[axes]._flatten(name) for name, axes in merged.items()}
            meshes.append(view)
        embedding_group = _embedding_group(world_size, token_sizes["pp"], lines["pp"].get_local_rank())
        _adopt_timeout([line.get_group() for line in lines.values()])
        if embedding_group is not None:
            _adopt_timeout([embedding_group])
        sizes = {name: line.size() for name, line in lines.items()}
        ranks = {name: line.get_local_rank() for name, line in lines.items()}
        return cls(
            world_size=world_size,
            rank=dist.get_rank(),
            sizes=sizes,
            ranks=ranks,
            groups={name: line.get_group() for name, line in lines.items() if sizes[name] > 1},
            sequence_parallel=parallel.sequence_parallel and sizes["tensor"] > 1,
            dense_mesh=meshes[1],
            expert_mesh=meshes[2],
            embedding_group=embedding_group,
        )

    @property
    def pp_size(self) -> int:
        """Ranks that split the layers."""
        return self.sizes.get("pp", 1)

    @property
    def pp_rank(self) -> int:
        """This rank's place in the pipeline."""
        return self.ranks.get("pp", 0)

    @property
    def pp_group(self) -> ProcessGroup | None:
        """Group of the ranks that split the layers."""
        return self.groups.get("pp")

    @property
    def dp_size(self) -> int:
        """Ranks that see different data."""
        return self.sizes.get("dp", 1)

    @property
    def dp_rank(self) -> int:
        """This rank among them."""
        return self.ranks.get("dp", 0)

    @property
    def dp_group(self) -> ProcessGroup | None:
        """Group of the dp ranks."""
        return self.groups.get("dp")

    @property
    def cp_size(self) -> int:
        """Ranks that split each sequence."""
        return self.sizes.get("cp", 1)

    @property
    def cp_rank(self) -> int:
        """This rank among them."""
        return self.ranks.get("cp", 0)

    @property
    def cp_group(self) -> ProcessGroup | None:
        """Group of the ranks that split each sequence."""
        return self.groups.get("cp")

    @property
    def tp_size(self) -> int:
        """Ranks that split each layer's weights."""
        return self.sizes.get("tensor", 1)

    @property
    def tp_rank(self) -> int:
        """This rank among them."""
        return self.ranks.get("tensor", 0)

    @property
    def tp_group(self) -> ProcessGroup | None:
        """Group of the ranks that split each layer's weights."""
        return self.groups.get("tensor")

    @property
    def kv_copies(self) -> int:
        """Tensor-parallel ranks that hold the same KV head."""
        return self.sizes.get("kv_copy", 1)

    @property
    def kv_copy_group(self) -> ProcessGroup | None:
        """Group of those ranks."""
        return self.groups.get("kv_copy")

    @property
    def ep_size(self) -> int:
        """Ranks that split the experts."""
        return self.sizes.get("ep", 1)

    @property
    def ep_rank(self) -> int:
        """This rank among them."""
        return self.ranks.get("ep", 0)

    @property
    def ep_group(self) -> ProcessGroup | None:
        """Group of the ranks that split the experts."""
        return self.groups.get("ep")

    @property
    def etp_size(self) -> int:
        """Ranks that split each expert."""
        return self.sizes.get("etp", 1)

    @property
    def etp_rank(self) -> int:
        """This rank among them."""
        return self.ranks.get("etp", 0)

    @property
    def edp_size(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return self.sizes.get("edp", 1)

    @property
    def edp_rank(self) -> int:
        """This rank among them."""
        return self.ranks.get("edp", 0)

    @property
    def edp_group(self) -> ProcessGroup | None:
        """Group of those ranks."""
        return self.groups.get("edp")

    @property
    def dp_cp_group(self) -> ProcessGroup | None:
        """Ranks over which gradients of dense parameters are summed."""
        return self.groups.get("dp_cp")

    @property
    def tp_cp_group(self) -> ProcessGroup | None:
        """Ranks that share the tokens of one micro-batch."""
        return self.groups.get("tp_cp")

    @property
    def ep_etp_group(self) -> ProcessGroup | None:
        """Ranks that exchange rows in front of experts; ep outer, etp inner."""
        return self.groups.get("ep_etp")

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.sizes.get("stage", 1)

    @property
    def stage_group(self) -> ProcessGroup | None:
        """All ranks of this pipeline stage."""
        return self.groups.get("stage")

    @property
    def world_group(self) -> ProcessGroup | None:
        """Group of all ranks; ``None`` in a world of one."""
        return dist.group.WORLD if self.world_size > 1 else None

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Ranks along each axis that a :class:`ShardSpec` may name."""
        return {axis: self.sizes.get(axis, 1) for axis in ("tp", "kv_copy", "ep", "etp")}

    @property
    def axis_ranks(self) -> dict[str, int]:
        """This rank's index along each axis that a :class:`ShardSpec` may name."""
        return {axis: self.ranks.get(axis, 0) for axis in ("tp", "kv_copy", "ep", "etp")}

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last layers."""
        return self.pp_rank == self.pp_size - 1

    @property
    def fsdp_mesh(self) -> DeviceMesh | None:
        """Where dense parameters are sharded: fsdp, below dp_replicate if there are replicas."""
        if self.dense_mesh is None:
            return None
        if self.sizes["dp_replicate"] > 1:
            return self.dense_mesh["dp_replicate", "fsdp"]
        return self.dense_mesh["fsdp"]

    def residual_rows(self, num_tokens: int) -> slice | None:
        """Rows of a micro-batch that the residual stream holds on this rank.

        Args:
            num_tokens: Rows of the micro-batch on this context-parallel rank; a multiple of the tensor-parallel size.

        Returns:
            The rows under sequence parallelism; ``None`` for all.
        """
        if not self.sequence_parallel:
            return None
        assert num_tokens % self.tp_size == 0, f"{num_tokens} tokens do not split over {self.tp_size} ranks"
        share = num_tokens // self.tp_size
        return slice(self.tp_rank * share, (self.tp_rank + 1) * share)

    def describe(self) -> str:
        """One line for the log."""
        dense = ", ".join(
            f"{name} {size}"
            for name, size in (("tp", self.tp_size), ("pp", self.pp_size), ("cp", self.cp_size))
            if size > 1
        )
        experts = f"ep {self.ep_size} x edp {self.edp_size}" + (f" x etp {self.etp_size}" if self.etp_size > 1 else "")
        with_sequence = " with sequence parallelism" if self.sequence_parallel else ""
        return f"{self.world_size} ranks: dp {self.dp_size}, {dense}{with_sequence}{', ' if dense else ''}{experts}"


def axis_sizes_of(
    parallel: ParallelConfig, world_size: int, num_kv_heads: int | None = None
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Work out the size of every axis.

    Args:
        parallel: The configured sizes.
        world_size: Number of ranks.
        num_kv_heads: KV heads of the model, if tensor-parallel ranks may outnumber them.

    Returns:
        Sizes of ``TOKEN_AXES``, of ``DENSE_AXES`` and of ``EXPERT_AXES``, in their order.

    Raises:
        ConfigError: If the sizes do not divide the world or each other.
    """
    for problem in world_problems(parallel, world_size):
        raise problem
    tp_size, pp_size = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp_size, etp_size = parallel.context_parallel_size, parallel.expert_tensor_parallel_size
    ep_size, replicas = parallel.expert_model_parallel_size, parallel.num_distributed_optimizer_instances
    dp_size, stage_size = world_size // parallel.ranks_per_replica, world_size // pp_size
    kv_split = min(tp_size, num_kv_heads or tp_size)
    if tp_size % kv_split:
        raise ConfigError(
            flag_of("tensor_model_parallel_size"),
            tp_size,
            f"is no multiple of the {num_kv_heads} KV heads",
            "use a multiple or a divisor of --num-query-groups",
        )
    dp_replicate = dp_size if parallel.data_parallel_engine != "fsdp2" else replicas
    token = (pp_size, dp_size, cp_size, tp_size)
    dense = (pp_size, dp_replicate, dp_size // dp_replicate * cp_size, kv_split, tp_size // kv_split)
    expert = (pp_size, stage_size // (ep_size * etp_size), ep_size, etp_size)
    return (
        dict(zip(TOKEN_AXES, token, strict=True)),
        dict(zip(DENSE_AXES, dense, strict=True)),
        dict(zip(EXPERT_AXES, expert, strict=True)),
    )


def _embedding_group(world_size: int, pp_size: int, pp_rank: int) -> ProcessGroup | None:
    """A group of the first and the last stage for each place in a stage; every rank creates all of them."""
    if pp_size == 1:
        return None
    stage_size, own = world_size // pp_size, None
    for place in range(stage_size):
        members = [place, (pp_size - 1) * stage_size + place]
        group = dist.new_group(members)
        if isinstance(group, ProcessGroup) and dist.get_rank() in members:
            own = group
    return own if pp_rank in (0, pp_size - 1) else None


def _adopt_timeout(groups: Sequence[ProcessGroup]) -> None:
    """Give groups the longest wait of the world's group. A device mesh creates them with torch's own, half an hour."""
    world = dist.group.WORLD
    assert world is not None
    timeout = world._get_backend(torch.device("cpu")).options._timeout
    for group in groups:
        _set_pg_timeout(timeout, group)
