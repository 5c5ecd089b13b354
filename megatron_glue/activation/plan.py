"""What the activation manager is asked to do, as one frozen object.

Floor 4, read once when the manager is built. It decides nothing about a single batch and holds no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class OffloadShare:
    """Which blocks' inputs leave: some of every N consecutive blocks of a model part, evenly spaced.

    The last block of the N stays first, since backward wants its input before any other.

    Attributes:
        num_leaving: Of every ``num_blocks`` blocks; 0: none leaves.
        num_blocks: N, at least 1.
    """

    num_leaving: int
    num_blocks: int

    def __post_init__(self) -> None:
        assert 0 <= self.num_leaving <= self.num_blocks >= 1

    def leaves(self, position: int) -> bool:
        """Whether the input of the block at this position of its part leaves."""
        num_staying = self.num_blocks - self.num_leaving
        return (position + 1) * num_staying % self.num_blocks >= num_staying


@dataclass(frozen=True)
class ActivationPlan:
    """The choices of a run. The default turns everything off: blocks are plain calls.

    Attributes:
        recompute: Run each block a second time in backward instead of keeping its intermediate results.
        num_recomputed: Recompute this many blocks of the model part, the first ones; None means all.
        recompute_modules: Modules of blocks that are not recomputed whole which are recomputed (see ``selective.py``).
        offload: Move the input of a recomputed block off the device until backward.
        offload_share: Which inputs of recomputed blocks leave; None: all.
        offload_modules: Regions of blocks that are not recomputed whose saved tensors move off the device (see
            ``module_offload.py``), e.g. ``attn_core``.
        least_offload_bytes: Smaller saved tensors stay.
        double_buffer: Bring inputs back through two buffers, ahead of backward; False: one buffer, copy then compute.
        offload_dir: Folder of the disk tier; unused on CUDA, where inputs move to host memory.
        buffer_size_bytes: Most bytes that the reload buffers may hold on the device; 0 means no bound.
        poison: Fill every freed reload buffer with NaN, so that a read at the wrong time shows.
        preserve_rng: Draw the same numbers from torch's global generators in recompute as in forward. It costs
            about 2 microseconds per block on a CPU, so it is on.
        integrated_memory: Whether the device shares its memory with the host, where there is no copy to hide and two
            buffers only cost room. None asks the device; True and False overrule it.
        max_inflight: Copies under way at one time: 2, one each way, or 1, so that they take less from collectives.
        max_bytes_per_s: Most bytes per second that one queue of the disk tier moves; 0 means no bound.
        conservative_sync: Wait for compute and copies at every hand-over, for bisecting a suspected race.
        record_timeline: Keep the begin and end of every copy and wait since the last ``reset_stats``.
    """

    recompute: bool = False
    num_recomputed: int | None = None
    recompute_modules: frozenset[str] = frozenset()
    offload: bool = False
    offload_share: OffloadShare | None = None
    offload_modules: frozenset[str] = frozenset()
    least_offload_bytes: int = 1 << 16
    double_buffer: bool = False
    offload_dir: Path | None = None
    buffer_size_bytes: int = 0
    poison: bool = False
    preserve_rng: bool = True
    integrated_memory: bool | None = None
    max_inflight: int = 2
    max_bytes_per_s: float = 0.0
    conservative_sync: bool = False
    record_timeline: bool = False

    def __post_init__(self) -> None:
        if self.offload and not self.recompute and not self.offload_modules:
            raise ValueError(
                "offload=True: the inputs of blocks move away only if blocks are recomputed; set recompute, or name "
                "modules whose saved tensors move"
            )
        if self.offload_modules and not self.offload:
            raise ValueError(f"offload_modules={sorted(self.offload_modules)}: nothing is moved; set offload")
        if self.double_buffer and not self.offload:
            raise ValueError("double_buffer=True: buffers bring offloaded inputs back; set offload")
        if self.buffer_size_bytes < 0:
            raise ValueError(f"buffer_size_bytes={self.buffer_size_bytes}: must not be negative; 0 means no bound")
        if self.num_recomputed is not None and self.num_recomputed < 1:
            raise ValueError(f"num_recomputed={self.num_recomputed}: must be at least 1; turn recompute off instead")
        if self.max_inflight not in (1, 2):
            raise ValueError(f"max_inflight={self.max_inflight}: there are two directions; use 1 or 2")
        if self.max_bytes_per_s < 0:
            raise ValueError(f"max_bytes_per_s={self.max_bytes_per_s}: must not be negative; 0 means no bound")
