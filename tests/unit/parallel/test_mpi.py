"""Where ranks of mpirun meet: what rank 0 tells, and what is wrong with an MPI. Real: tests/integration/test_mpi.py."""

from __future__ import annotations

import importlib
import socket
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.launchers import RankEnvironment
from megatron_glue.parallel.mpi import agree_on_address


class _World:
    """A communicator that broadcasts to nobody, and gives rank 1 what ``told`` says."""

    def __init__(self, rank: int, size: int, told: bytes) -> None:
        self.rank, self.size, self.told = rank, size, told
        self.events: list[str] = []

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Bcast(self, buffer: list[Any], root: int) -> None:
        assert root == 0
        self.events.append("broadcast")
        if self.rank:
            buffer[0][: len(self.told)] = self.told


def _install(monkeypatch: pytest.MonkeyPatch, world: _World) -> None:
    package, mpi = ModuleType("mpi4py"), ModuleType("mpi4py.MPI")
    package.rc = lambda **settings: world.events.append(f"rc {settings}")  # type: ignore[attr-defined]
    steps = {name: lambda name=name: world.events.append(name) for name in ("Init", "Finalize")}
    mpi.__dict__.update(SimpleNamespace(COMM_WORLD=world, BYTE="byte", **steps).__dict__)
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)


def _place(rank: int, local_world_size: int = 1) -> RankEnvironment:
    return RankEnvironment(rank, rank % local_world_size, 2, local_world_size, "", "Open MPI")


def test_rank_0_tells_its_name_and_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(0, 2, b"")
    _install(monkeypatch, world)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu01")
    place = agree_on_address(_place(0), resolve=str)
    assert (place.master_addr, place.rank, place.launcher) == ("gpu01", 0, "Open MPI")
    assert place.master_port is not None
    assert 0 < place.master_port < 2**16
    assert world.events == ["rc {'initialize': False, 'finalize': False}", "Init", "broadcast", "Finalize"]


def test_ranks_of_one_machine_need_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, _World(0, 2, b""))
    assert agree_on_address(_place(0, local_world_size=2)).master_addr == "127.0.0.1"


def test_other_ranks_hear_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, _World(1, 2, b"gpu01 4000"))
    place = agree_on_address(_place(1), resolve=str)
    assert (place.master_addr, place.master_port) == ("gpu01", 4000)


def test_f114_a_name_that_leads_nowhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> object:
        raise OSError(-2, "Name or service not known")

    _install(monkeypatch, _World(1, 2, b"gpu01 4000"))
    with pytest.raises(ConfigError, match="rank 0 runs on gpu01, which cannot be resolved here"):
        agree_on_address(_place(1), refuse)


def test_mpi4py_of_another_mpi_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a foreign mpirun every process is a world of one."""
    world = _World(0, 1, b"")
    _install(monkeypatch, world)
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE=2: mpi4py sees rank 0 of 1"):
        agree_on_address(_place(0))
    assert world.events[-1] == "Finalize"


@pytest.mark.parametrize("error", [ImportError("No module named 'mpi4py'"), RuntimeError("cannot load MPI library")])
def test_without_mpi4py_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: not set, and mpi4py.*pip install 'megatron_glue\[mpi\]'"):
        agree_on_address(_place(1))
