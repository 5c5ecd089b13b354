"""The ranks that save or load together: they agree about failures at every station, and on who writes what.

A save in the background has a group of its own, since collectives of two threads on one group would mix.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed import ProcessGroup

from megatron_glue.config.errors import ConfigError
from megatron_glue.parallel.agreement import PeerFailedError, together
from megatron_glue.parallel.collectives import all_reduce_max, max_over_ranks
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.parts import GlobalTensor
from megatron_glue.training.checkpoint.sharing import WriteShares
from megatron_glue.training.checkpoint.tensors import NamedPart

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Ranks:
    """All ranks of a run. Every method is called by all of them.

    Attributes:
        rank: This one.
        world_size: Their number.
        group: Their gloo group; ``None`` for one process.
        root: Folder of checkpoints, for messages.
    """

    rank: int
    world_size: int
    group: ProcessGroup | None
    root: Path
    _shares: WriteShares = field(default_factory=WriteShares, init=False, repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this rank does what is done once."""
        return self.rank == 0

    def together(self, work: Callable[[], T]) -> T:
        """Do this rank's part; return once all ranks have done theirs, raise on all if one failed.

        Args:
            work: This rank's part, without collectives in it.

        Raises:
            ConfigError: Where ``work`` raised it.
            CheckpointError: On all other ranks then; and on all ranks if ``work`` raised anything else.
        """

        def own_part() -> T:
            try:
                return work()
            except Exception as error:
                raise self._as_one_line(error) from error

        try:
            return together(own_part, self.group)
        except PeerFailedError as error:
            raise CheckpointError(str(error)) from error

    def together_in_collectives(self, work: Callable[[], None]) -> None:
        """As :meth:`together`, for work with collectives in it that agrees before each of them whether all is well.

        Args:
            work: What one rank alone raises before a collective, it raises on all (``agreement.together``), so that no
                rank waits in one for a peer that is here already. What one raises behind the last is shared here.
        """
        self.together(work)

    def on_first(self, work: Callable[[], T]) -> T | None:
        """Let the first rank do something; the others wait for it and get ``None``."""
        return self.together(lambda: work() if self.is_first else None)

    def ask_first(self, question: Callable[[], int | None]) -> int | None:
        """The first rank's answer on all ranks: a number that is not negative, or nothing."""
        answer = self.on_first(question)
        shared = max_over_ranks(-1 if answer is None else answer, self.group)
        return None if shared < 0 else shared

    def _as_one_line(self, error: Exception) -> CheckpointError | ConfigError:
        """What a rank raises instead of an error, so that all ranks see the same kind and take the same way on."""
        if isinstance(error, CheckpointError | ConfigError):
            return error
        if isinstance(error, PeerFailedError):
            return CheckpointError(str(error))
        if isinstance(error, OSError):
            line = f"{error.filename or self.root}: {error.strerror or error}"
        else:
            logger.debug("an error that is no full disk and no damaged file", exc_info=error)
            line = f"{self.root}: {type(error).__name__}: {' '.join(str(error).split())}"
        return CheckpointError(line)

    def choose_own(self, tensors: Mapping[str, GlobalTensor]) -> list[NamedPart]:
        """Share the writing: every part goes to one of the ranks that hold it; see :class:`WriteShares`.

        Args:
            tensors: What this rank holds. Parts of the same name and place are equal on all ranks that hold them.

        Returns:
            What this rank writes.
        """
        held = [NamedPart(name, tensor.shape, part) for name, tensor in tensors.items() for part in tensor.parts]
        return self._shares.choose(held, self.rank, self.group)

    def union_of(self, names: list[str], own: set[str]) -> set[str]:
        """Those of ``names``, a list that all ranks have alike, that are in the set of any rank."""
        flags = torch.tensor([name in own for name in names], dtype=torch.uint8)
        return {name for name, flag in zip(names, all_reduce_max(flags, self.group).tolist(), strict=True) if flag}
