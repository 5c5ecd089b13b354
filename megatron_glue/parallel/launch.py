"""Starts and ends the process group of a run.

It receives who this process is as values and reads no environment itself; torch, and libraries that are loaded later,
read the variables that torchrun sets, so they are set here where another launcher did not. A process that no launcher
started needs no process group at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_glue.config.environment import RankEnvironment, set_environment_default
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.parallel.mpi import agree_on_address


def choose_device(name: str, environment: RankEnvironment) -> torch.device:
    """Translate the configured device into this rank's.

    Args:
        name: ``auto``, ``cpu`` or ``cuda``.
        environment: Who this process is.

    Returns:
        ``cpu`` or ``cuda:<local rank>``.

    Raises:
        ConfigError: If CUDA was asked for and is missing, or this machine has fewer GPUs than ranks.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        reason = "this machine or this build of torch has no CUDA device"
        raise ConfigError(flag_of("device"), name, reason, "give --device cpu or --device auto")
    if name == "cpu" or not available:
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if environment.local_rank >= num_gpus:
        raise ConfigError(
            flag_of("device"),
            name,
            f"local rank {environment.local_rank} has no GPU of its own ({num_gpus} here)",
            "start one process per GPU, or give --device cpu",
        )
    return torch.device("cuda", environment.local_rank)


def init_distributed(environment: RankEnvironment, timeout: timedelta, device: torch.device) -> None:
    """Join the process group of the run: gloo for CPU tensors and, on GPUs, NCCL for theirs.

    Args:
        environment: Who this process is. Without a launcher nothing happens.
        timeout: Longest wait for another rank inside one collective.
        device: This rank's device.

    Raises:
        ConfigError: If the ranks cannot find each other, or the group that came together is not the one that the
            launcher announced.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not environment.launcher:
        return
    if not environment.master_addr:
        environment = agree_on_address(environment)
    for name, value in environment.variables.items():
        set_environment_default(name, value)
    # gloo stays at hand on GPUs too: flags and counts of the host then agree without a device synchronisation.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, init_method="env://", rank=environment.rank, world_size=environment.world_size, timeout=timeout
    )
    if dist.get_world_size() != environment.world_size:
        raise ConfigError(
            "WORLD_SIZE",
            environment.world_size,
            f"{dist.get_world_size()} ranks came together",
            "check the launcher's rendezvous settings",
        )


def shutdown() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def distributed_session(environment: RankEnvironment, timeout: timedelta, device: torch.device) -> Iterator[None]:
    """Join the process group for the length of a ``with`` block.

    After an exception on this rank its connections are closed at once. Peers that wait for it in a collective then get
    an error (gloo: immediately, NCCL: at the latest after ``timeout``) instead of waiting for ever.

    Args:
        environment: Who this process is.
        timeout: Longest wait for another rank inside one collective.
        device: This rank's device.
    """
    init_distributed(environment, timeout, device)
    try:
        yield
    except BaseException:
        # NCCL's orderly shutdown waits for kernels that peers may never complete: there, leaving is up to process exit.
        if device.type == "cpu":
            shutdown()
        raise
    shutdown()
