"""How ranks that mpirun started find each other: rank 0 chooses an address and a port, MPI tells the others.

mpirun says who each process is, not where rank 0 listens. MPI is used for this one broadcast and left again, before the
process group of torch is made: a process that has left MPI may end whenever and however it likes, without the others
waiting for it in ``MPI_Finalize``. It is not needed where MASTER_ADDR and MASTER_PORT are given.

mpi4py is optional and imported here alone.
"""

from __future__ import annotations

import importlib
import socket
from dataclasses import replace
from typing import Any

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.launchers import MPI_NAMES, RankEnvironment, Resolve, resolve_host
from megatron_glue.parallel.local_ranks import free_port

_ANSWER_BYTES = 512  # a host name has at most 253


def agree_on_address(environment: RankEnvironment, resolve: Resolve = resolve_host) -> RankEnvironment:
    """Let all ranks know where rank 0 will listen; every rank must call this.

    Args:
        environment: Who this process is, without an address.
        resolve: Looks a host name up and raises ``OSError`` if it leads nowhere.

    Returns:
        The same with address and port.

    Raises:
        ConfigError: If mpi4py is missing or belongs to another MPI library than mpirun, or rank 0's host name leads
            nowhere from here.
    """
    mpi = _load_mpi()
    mpi.Init()
    try:
        world = mpi.COMM_WORLD
        size_name = MPI_NAMES[environment.launcher][2]
        if (world.Get_rank(), world.Get_size()) != (environment.rank, environment.world_size):
            raise ConfigError(
                size_name,
                environment.world_size,
                f"mpi4py sees rank {world.Get_rank()} of {world.Get_size()}: it uses another MPI library than mpirun",
                "install mpi4py for the MPI that mpirun belongs to, or give MASTER_ADDR and MASTER_PORT to all ranks",
            )
        # Bytes of a fixed size: mpi4py's way of sending objects would unpickle what arrives.
        answer = bytearray(_ANSWER_BYTES)
        if environment.rank == 0:
            text = f"{_own_address(environment)} {free_port()}".encode()
            answer[: len(text)] = text
        world.Bcast([answer, mpi.BYTE], root=0)
    finally:
        mpi.Finalize()
    address, port = bytes(answer).rstrip(b"\0").decode().split(" ")
    try:
        resolve(address)
    except OSError as error:
        raise ConfigError(
            "MASTER_ADDR",
            "",
            f"rank 0 runs on {address}, which cannot be resolved here ({error.strerror or error})",
            "give MASTER_ADDR and MASTER_PORT to all ranks, with an address that they all reach",
        ) from error
    return replace(environment, master_addr=address, master_port=int(port))


def _own_address(environment: RankEnvironment) -> str:
    """The name of this machine; where all ranks run on it, it need not be known to anybody."""
    return "127.0.0.1" if environment.local_world_size == environment.world_size else socket.gethostname()


def _load_mpi() -> Any:
    """Import mpi4py without letting it enter MPI, or leave it at exit, by itself."""
    try:
        importlib.import_module("mpi4py").rc(initialize=False, finalize=False)
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            "MASTER_ADDR",
            "",
            f"not set, and mpi4py, by which rank 0 would tell its address, does not load ({error})",
            "pip install 'megatron_glue[mpi]', or give MASTER_ADDR and MASTER_PORT to all ranks (mpirun -x)",
        ) from error
