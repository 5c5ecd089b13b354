"""A process group from a launcher's values, and its end when one rank fails."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_glue.config.environment import RankEnvironment
from megatron_glue.parallel.launch import distributed_session
from tests.support.processes import run_distributed

CPU = torch.device("cpu")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def as_launched(rank: int, world_size: int, port: int) -> RankEnvironment:
    """Trade the harness's process group for the variables that torchrun sets."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return RankEnvironment(rank, rank, world_size, world_size, "127.0.0.1", "torchrun", port)


def run_session(rank: int, world_size: int, port: int) -> None:
    environment = as_launched(rank, world_size, port)
    with distributed_session(environment, timedelta(seconds=30), CPU):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world_size
    assert not dist.is_initialized()


def test_session_joins_and_leaves() -> None:
    run_distributed(run_session, 2, free_port())


class Boom(Exception):
    pass


def reduce_and_raise(environment: RankEnvironment) -> None:
    with distributed_session(environment, timedelta(seconds=30), CPU):
        dist.all_reduce(torch.ones(1))
        raise Boom


def reduce_twice(environment: RankEnvironment) -> None:
    with distributed_session(environment, timedelta(seconds=30), CPU):
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))


def fail_on_one(rank: int, world_size: int, port: int, folder: str) -> None:
    environment = as_launched(rank, world_size, port)
    if rank > 0:
        with pytest.raises(RuntimeError):
            reduce_twice(environment)
        (Path(folder) / f"rank {rank} is free").touch()
        return
    with pytest.raises(Boom):
        reduce_and_raise(environment)
    # Stay alive: peers must be freed by the closed connections, not by this process's death.
    deadline = time.monotonic() + 20
    while len(list(Path(folder).iterdir())) < world_size - 1:
        assert time.monotonic() < deadline, "peers still wait for this rank"
        time.sleep(0.02)


def test_peers_of_a_failed_rank_end_at_once(tmp_path: Path) -> None:
    run_distributed(fail_on_one, 3, free_port(), str(tmp_path))
