"""Which rank does what: the mesh of ranks, built once and passed explicitly.

Two views of the same ranks. Dense layers see (pp, dp_replicate, dp_shard, cp, tp); experts see (pp, edp, ep, etp),
where ep is innermost within the data-parallel ranks, so that the ranks that exchange tokens are neighbours. Axes of
size 1 are part of both views: tensor, pipeline and context parallelism have their place before they have a size.

Layers never see this object. They get only the process group they use, and ``None`` stands for a group of one, so that
a model on one process is plain torch. There are no getters and no module state here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.sections import ParallelConfig

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")
_AXES_OF_SIZE_ONE = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_tensor_parallel_size",
)


@dataclass(frozen=True, eq=False)
class ParallelMesh:
    """Sizes, this rank's coordinates, device meshes and process groups. Build it with :meth:`build`.

    Attributes:
        world_size: All ranks.
        rank: This rank among all.
        dp_size: Ranks that see different data.
        dp_rank: This rank among them.
        ep_size: Ranks that split the experts.
        ep_rank: This rank among them.
        edp_size: Ranks that hold the same experts; dp_size / ep_size.
        edp_rank: This rank among them.
        dense_mesh: Device mesh over ``DENSE_AXES``; ``None`` in a world of one.
        expert_mesh: Device mesh over ``EXPERT_AXES``; ``None`` in a world of one.
        dp_group: Group of the dp ranks; ``None`` for size 1, as for the next two.
        ep_group: Group of the ep ranks.
        edp_group: Group of the edp ranks.
    """

    world_size: int = 1
    rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    edp_size: int = 1
    edp_rank: int = 0
    dense_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    dp_group: ProcessGroup | None = None
    ep_group: ProcessGroup | None = None
    edp_group: ProcessGroup | None = None

    @classmethod
    def build(cls, parallel: ParallelConfig, device_type: str) -> ParallelMesh:
        """Lay the ranks of the running process group out; without one, the world is this process alone.

        Args:
            parallel: Sizes of the axes.
            device_type: ``cpu`` or ``cuda``: where collectives of the mesh work.

        Returns:
            The mesh. It creates process groups, so every rank must call this.

        Raises:
            ConfigError: If a size does not divide the world, or belongs to an axis that must be 1.
        """
        for field in _AXES_OF_SIZE_ONE:
            if (size := getattr(parallel, field)) != 1:
                raise ConfigError(flag_of(field), size, "this axis is not available yet", "set it to 1")
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        ep_size = parallel.expert_model_parallel_size
        if world_size % ep_size:
            raise ConfigError(
                flag_of("expert_model_parallel_size"),
                ep_size,
                f"does not divide the {world_size} data-parallel ranks",
                "use a divisor of their number",
            )
        if world_size == 1:
            return cls()
        dense_sizes = (1, world_size, 1, 1, 1) if parallel.data_parallel_engine == "ddp" else (1, 1, world_size, 1, 1)
        dense = init_device_mesh(device_type, dense_sizes, mesh_dim_names=DENSE_AXES)
        expert_sizes = (1, world_size // ep_size, ep_size, 1)
        expert = init_device_mesh(device_type, expert_sizes, mesh_dim_names=EXPERT_AXES)
        data = dense[_data_axis(dense)]
        return cls(
            world_size=world_size,
            rank=dist.get_rank(),
            dp_size=world_size,
            dp_rank=data.get_local_rank(),
            ep_size=ep_size,
            ep_rank=expert.get_local_rank("ep"),
            edp_size=world_size // ep_size,
            edp_rank=expert.get_local_rank("edp"),
            dense_mesh=dense,
            expert_mesh=expert,
            dp_group=data.get_group(),
            ep_group=expert.get_group("ep") if ep_size > 1 else None,
            edp_group=expert.get_group("edp") if world_size > ep_size else None,
        )

    @property
    def tp_size(self) -> int:
        """Ranks that split each layer's weights."""
        return 1

    @property
    def pp_size(self) -> int:
        """Ranks that split the layers."""
        return 1

    @property
    def cp_size(self) -> int:
        """Ranks that split each sequence."""
        return 1

    @property
    def world_group(self) -> ProcessGroup | None:
        """Group of all ranks; ``None`` in a world of one."""
        return dist.group.WORLD if self.world_size > 1 else None

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Ranks along each axis that a :class:`ShardSpec` may name."""
        return {"ep": self.ep_size}

    @property
    def data_mesh(self) -> DeviceMesh | None:
        """One-dimensional mesh of the dp ranks."""
        return None if self.dense_mesh is None else self.dense_mesh[_data_axis(self.dense_mesh)]

    @property
    def expert_data_mesh(self) -> DeviceMesh | None:
        """Mesh (edp, ep) of the dp ranks."""
        return None if self.expert_mesh is None else self.expert_mesh["edp", "ep"]

    def describe(self) -> str:
        """One line for the log."""
        return f"{self.world_size} ranks: dp {self.dp_size}, ep {self.ep_size} x edp {self.edp_size}"


def _data_axis(dense: DeviceMesh) -> str:
    """The axis that holds the dp ranks: replicas under ddp, shards under fsdp2."""
    return "dp_shard" if dense["dp_shard"].size() > 1 else "dp_replicate"
