"""Who this process is among the processes of a run, from what its launcher left in the environment.

The one place that derives rank, local rank, world size, local world size and the address of rank 0: under torchrun,
under srun with one task per rank, under Open MPI and MPICH, and without any launcher. Variables that are half set or
contradict each other, and a head node whose name leads nowhere, end the start with the reason. There is no falling back
to this machine: each node would become a world of its own that trains alone or waits for ever.

It receives the environment as a mapping; ``environment.py`` reads it.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_glue.config.errors import ConfigError

Resolve = Callable[[str], object]
Counts = tuple[int, int, int, int]
"""Rank, local rank, world size, local world size."""

LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets, and what libraries expect under any launcher."""

MPI_NAMES = {
    "Open MPI": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    "MPICH": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
}
"""Rank, local rank, world size and local world size by launcher, as mpirun of each sets them."""

SLURM_NAMES = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    *("SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID"),
)
"""What srun sets for each task of a step. SLURM_LAUNCH_NODE_IPADDR is not among them: it is the machine that srun was
called on, which need not be rank 0's."""

_OWN_MACHINE = ("localhost", "127.0.0.1", "::1")
_FIRST_PORT, _NUM_PORTS = 10000, 20000  # below the ports that Linux hands out by itself, from 32768


def resolve_host(name: str) -> object:
    """Look a host name up; raises ``OSError`` if it leads nowhere."""
    return socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)


@dataclass(frozen=True)
class RankEnvironment:
    """Who this process is among the processes of the run.

    Attributes:
        rank: Index of this process, 0 to ``world_size - 1``.
        local_rank: Its index on this machine.
        world_size: Number of processes of the run.
        local_world_size: Number of them on this machine.
        master_addr: Where rank 0 listens; empty without a launcher, and where ranks are to agree on it by MPI.
        launcher: What started this process: ``torchrun`` (or something that sets the same variables), ``Slurm``,
            ``Open MPI`` or ``MPICH``; empty for a process on its own.
        master_port: The port there; ``None`` where there is no address.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = ""
    launcher: str = ""
    master_port: int | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that talks."""
        return self.rank == 0

    @property
    def variables(self) -> dict[str, str]:
        """The variables that torchrun would have set, for libraries that read them; needs an address."""
        values = (self.rank, self.local_rank, self.world_size, self.local_world_size)
        texts = (*map(str, values), self.master_addr, str(self.master_port))
        return dict(zip(LAUNCHER_NAMES, texts, strict=True))

    @classmethod
    def from_mapping(cls, environ: Mapping[str, str], resolve: Resolve = resolve_host) -> RankEnvironment:
        """Read the launcher's variables.

        The launcher nearest to the process counts: torchrun in a Slurm step, or mpirun in one, hides Slurm. A step or
        an mpirun of a single process is a process on its own.

        Args:
            environ: The environment.
            resolve: Looks a host name up and raises ``OSError`` if it leads nowhere.

        Raises:
            ConfigError: When variables are half set, no numbers, or contradict each other, or the head node of a Slurm
                job cannot be resolved.
        """
        if environ.get("RANK") or environ.get("LOCAL_RANK"):
            place = _torchrun(environ)
            _check_outer_launcher(environ, place)
            return place
        place = _outer_launcher(environ, resolve)
        if place is not None:
            return place if place.world_size > 1 else cls()
        stray = [name for name in LAUNCHER_NAMES if environ.get(name)]
        if stray:
            raise _half_set("RANK", stray, "start with torchrun, or unset all of them")
        return cls()


def first_host(nodelist: str) -> str:
    """Return the first host of Slurm's short form of a list, e.g. ``gpu07`` of ``gpu[07-09,12],login1``.

    Raises:
        ConfigError: If the text is no such list.
    """
    # The first entry ends at the first comma outside brackets.
    found = re.match(r"(?:[^\[\],\s]+|\[[^\[\]]+\])+", nodelist)
    host = re.sub(r"\[([^\[\],-]*)[^\]]*\]", r"\1", found[0]) if found else ""
    if found is None or not host or nodelist[found.end() : found.end() + 1] not in ("", ","):
        raise ConfigError("SLURM_STEP_NODELIST", nodelist, "is no list of hosts", "start ranks with srun or torchrun")
    return host


def _torchrun(environ: Mapping[str, str]) -> RankEnvironment:
    present = [name for name in LAUNCHER_NAMES if environ.get(name)]
    for name in LAUNCHER_NAMES:
        if name not in present:
            raise _half_set(name, present, "start with torchrun, or unset all of them")
    values = _counts(environ, LAUNCHER_NAMES[:4], "torchrun")
    return RankEnvironment(*values, environ["MASTER_ADDR"], "torchrun", _port(environ, "torchrun"))


def _check_outer_launcher(environ: Mapping[str, str], place: RankEnvironment) -> None:
    """Find variables of torchrun that were exported for a whole job, and a torchrun per node that knows no other."""
    is_torchrun = bool(environ.get("TORCHELASTIC_RUN_ID"))
    if is_torchrun:
        num_nodes = environ.get("SLURM_STEP_NUM_NODES", "1") if environ.get("SLURM_STEP_ID") else "1"
        if num_nodes.isdigit() and int(num_nodes) > 1 and place.world_size == place.local_world_size:
            raise ConfigError(
                "WORLD_SIZE",
                place.world_size,
                f"torchrun made a world of this node alone, and the Slurm step runs on {num_nodes} nodes",
                "give torchrun --nnodes and a rendezvous as scripts/slurm do, or start one step per node",
            )
        return
    for names in (*MPI_NAMES.values(), SLURM_NAMES[:4]):
        rank, size = environ.get(names[0], ""), environ.get(names[2], "1")
        if not (rank.isdigit() and size.isdigit()) or int(size) == 1:
            continue
        if (int(rank), int(size)) != (place.rank, place.world_size):
            raise ConfigError(
                "RANK",
                place.rank,
                f"of WORLD_SIZE={place.world_size} contradicts {names[0]}={rank} of {names[2]}={size}",
                f"unset {', '.join(LAUNCHER_NAMES[:4])}, or start with torchrun",
            )


def _outer_launcher(environ: Mapping[str, str], resolve: Resolve) -> RankEnvironment | None:
    is_step = bool(environ.get("SLURM_STEP_ID"))
    for launcher, names in MPI_NAMES.items():
        present = [name for name in names if environ.get(name)]
        # srun --mpi=pmi2 speaks PMI too, and leaves the local names to Slurm's own.
        if present and not (is_step and set(present) == {"PMI_RANK", "PMI_SIZE"}):
            return _mpi(environ, launcher)
    if is_step:
        return _slurm(environ, resolve)
    _check_batch_shell(environ)
    return None


def _mpi(environ: Mapping[str, str], launcher: str) -> RankEnvironment:
    names = MPI_NAMES[launcher]
    present = [name for name in names if environ.get(name)]
    for name in names:
        if name not in present:
            raise _half_set(name, present, f"start with mpirun of {launcher}")
    values = _counts(environ, names, "mpirun")
    _check_exported(environ, values, names[2:], launcher)
    address, has_port = environ.get("MASTER_ADDR", ""), bool(environ.get("MASTER_PORT"))
    if bool(address) != has_port:
        missing, given = ("MASTER_PORT", "MASTER_ADDR") if address else ("MASTER_ADDR", "MASTER_PORT")
        raise _half_set(missing, [given], "give both to all ranks, or neither: then rank 0 tells them by MPI")
    return RankEnvironment(*values, address, launcher, _port(environ, "mpirun") if has_port else None)


def _slurm(environ: Mapping[str, str], resolve: Resolve) -> RankEnvironment:
    present = [name for name in SLURM_NAMES if environ.get(name)]
    for name in SLURM_NAMES:
        if name not in present:
            raise _half_set(name, present, "start ranks with srun, and let a container pass all SLURM_* variables on")
    rank, local_rank, world_size = (_number(environ, name, "srun") for name in SLURM_NAMES[:3])
    tasks, node = _tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"]), _number(environ, "SLURM_NODEID", "srun")
    if sum(tasks) != world_size or node >= len(tasks):
        raise ConfigError(
            "SLURM_STEP_TASKS_PER_NODE",
            environ["SLURM_STEP_TASKS_PER_NODE"],
            f"contradicts SLURM_STEP_NUM_TASKS={world_size}, SLURM_NODEID={node}",
            "start ranks with srun",
        )
    values = (rank, local_rank, world_size, tasks[node])
    _check_sizes(SLURM_NAMES[:4], values, "srun")
    _check_exported(environ, values, ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"), "Slurm")
    if world_size == 1:
        return RankEnvironment()
    if environ.get("MASTER_PORT"):
        port = _port(environ, "srun")
    else:
        # Two jobs that share a node have different numbers, and so have two steps of one job.
        job, step = (_number(environ, name, "srun") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        port = _FIRST_PORT + (61 * job + step) % _NUM_PORTS
    return RankEnvironment(*values, _head_node(environ, rank, len(tasks), resolve), "Slurm", port)


def _head_node(environ: Mapping[str, str], rank: int, num_nodes: int, resolve: Resolve) -> str:
    """Where rank 0 of a step runs: the first node of its list, unless MASTER_ADDR names an address of it."""
    given = environ.get("MASTER_ADDR", "")
    if given in _OWN_MACHINE and num_nodes > 1:
        reason = f"is this machine, and the Slurm step runs on {num_nodes} nodes"
        raise ConfigError("MASTER_ADDR", given, reason, "unset it, or give an address of the first node")
    nodelist = environ["SLURM_STEP_NODELIST"]
    head = first_host(nodelist)
    own = environ.get("SLURMD_NODENAME", head)
    if rank == 0 and own != head and not given:
        raise ConfigError(
            "SLURM_STEP_NODELIST",
            nodelist,
            f"starts with {head}, and rank 0 runs on {own}",
            "use srun's block or cyclic distribution of tasks, or set MASTER_ADDR to rank 0's address",
        )
    try:
        resolve(given or head)
    except OSError as error:
        field, value = ("MASTER_ADDR", given) if given else ("SLURM_STEP_NODELIST", nodelist)
        reason = f"the head node {given or head} cannot be resolved ({error.strerror or error})"
        remedy = "set MASTER_ADDR to an address of the first node that all nodes reach"
        raise ConfigError(field, value, reason, remedy) from error
    return given or head


def _check_batch_shell(environ: Mapping[str, str]) -> None:
    """Find a process that the shell of a batch job started, where srun was to start one per task."""
    rank, size = environ.get("SLURM_PROCID", ""), environ.get("SLURM_NTASKS", "1")
    if rank not in ("", "0") or (rank and size != "1"):
        raise ConfigError(
            "SLURM_PROCID",
            rank,
            f"and SLURM_NTASKS={size} are set, but SLURM_STEP_ID is not: srun did not start this process",
            "start ranks with srun or torchrun; a single process: srun --ntasks=1",
        )


def _tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's short form, e.g. ``2(x3),1`` to 2, 2, 2, 1."""
    tasks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if found is None:
            raise ConfigError("SLURM_STEP_TASKS_PER_NODE", text, "is no list of counts", "start ranks with srun")
        tasks += [int(found[1])] * int(found[2] or 1)
    return tasks


def _counts(environ: Mapping[str, str], names: Sequence[str], program: str) -> Counts:
    rank, local_rank, world_size, local_world_size = (_number(environ, name, program) for name in names)
    values = (rank, local_rank, world_size, local_world_size)
    _check_sizes(names, values, program)
    return values


def _check_sizes(names: Sequence[str], values: Counts, program: str) -> None:
    rank, local_rank, world_size, local_world_size = values
    for name, value, size_name, size in (
        (names[0], rank, names[2], world_size),
        (names[1], local_rank, names[3], local_world_size),
    ):
        if value >= size:
            raise ConfigError(name, value, f"must be below {size_name}={size}", f"start with {program}")
    if local_world_size > world_size:
        raise ConfigError(names[3], local_world_size, f"exceeds {names[2]}={world_size}", f"start with {program}")


def _check_exported(environ: Mapping[str, str], values: Counts, size_names: Sequence[str], launcher: str) -> None:
    """Sizes that a job script exports for torchrun must be those of the launcher that started this process."""
    for name, size, own_name in zip(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), values[2:], size_names, strict=True):
        if environ.get(name, str(size)) != str(size):
            reason = f"contradicts {own_name}, by which {launcher} started {size}"
            raise ConfigError(name, environ[name], reason, f"unset {name}")


def _half_set(missing: str, present: Sequence[str], remedy: str) -> ConfigError:
    return ConfigError(missing, "", f"not set, but {', '.join(present)} {'is' if len(present) == 1 else 'are'}", remedy)


def _port(environ: Mapping[str, str], program: str) -> int:
    port = _number(environ, "MASTER_PORT", program)
    if not 0 < port < 2**16:
        raise ConfigError("MASTER_PORT", port, "no port is above 65535 or below 1", "give a port that is free")
    return port


def _number(environ: Mapping[str, str], name: str, program: str) -> int:
    """Read a count that must not be negative."""
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(name, text, "not a whole number", f"start with {program}, which sets it")
    return int(text)
