"""Who a process is: one table of environments per launcher, and every way in which one can be wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.launchers import LAUNCHER_NAMES, RankEnvironment, first_host
from tests.support.commands import ROOT, environment

TORCHRUN = dict(zip(LAUNCHER_NAMES, ("5", "1", "8", "4", "node0", "29500"), strict=True))
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "PMI_FD": "9"}
# What srun of Slurm 22.05 set for task 3 of a step of 2 + 2 + 1 tasks.
SLURM = {
    "SLURMD_NODENAME": "gpu08",
    "SLURM_JOB_ID": "4711",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
BATCH_SHELL = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SLURM_PORT = 10000 + (61 * 4711 + 2) % 20000
ADDRESS = {"MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "4000"}
ALONE = RankEnvironment()


def _resolve(name: str) -> object:
    if name == "nowhere":
        raise OSError(-2, "Name or service not known")
    return name


def _read(environ: dict[str, str]) -> RankEnvironment:
    return RankEnvironment.from_mapping({"PATH": "/bin", **environ}, _resolve)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, ALONE),
        (TORCHRUN, RankEnvironment(5, 1, 8, 4, "node0", "torchrun", 29500)),
        (OPEN_MPI, RankEnvironment(5, 1, 8, 4, "", "Open MPI")),
        ({**OPEN_MPI, **ADDRESS}, RankEnvironment(5, 1, 8, 4, "10.1.2.3", "Open MPI", 4000)),
        ({**OPEN_MPI, "WORLD_SIZE": "8"}, RankEnvironment(5, 1, 8, 4, "", "Open MPI")),
        (MPICH, RankEnvironment(5, 1, 8, 4, "", "MPICH")),
        (SLURM, RankEnvironment(3, 1, 5, 2, "gpu07", "Slurm", SLURM_PORT)),
        ({**SLURM, "MASTER_PORT": "4000"}, RankEnvironment(3, 1, 5, 2, "gpu07", "Slurm", 4000)),
        ({**SLURM, **ADDRESS}, RankEnvironment(3, 1, 5, 2, "10.1.2.3", "Slurm", 4000)),
        ({**SLURM, "MASTER_ADDR": "", "RANK": ""}, RankEnvironment(3, 1, 5, 2, "gpu07", "Slurm", SLURM_PORT)),
        # The launcher nearest to the process counts.
        ({**SLURM, **TORCHRUN, "TORCHELASTIC_RUN_ID": "a"}, RankEnvironment(5, 1, 8, 4, "node0", "torchrun", 29500)),
        ({**SLURM, **OPEN_MPI}, RankEnvironment(5, 1, 8, 4, "", "Open MPI")),
        ({**SLURM, **MPICH}, RankEnvironment(5, 1, 8, 4, "", "MPICH")),
        # srun --mpi=pmi2 sets these two beside its own.
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "5"}, RankEnvironment(3, 1, 5, 2, "gpu07", "Slurm", SLURM_PORT)),
        # A world of one needs nobody's address.
        (BATCH_SHELL, ALONE),
        ({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8"}, ALONE),
        (
            {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "nowhere", "SLURM_NODEID": "0"}
            | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
            ALONE,
        ),
        (dict(zip(OPEN_MPI, ("0", "0", "1", "1"), strict=False)), ALONE),
    ],
)
def test_the_place_of_a_process(environ: dict[str, str], place: RankEnvironment) -> None:
    assert _read(environ) == place


def test_the_first_rank_talks_and_libraries_find_torchruns_variables() -> None:
    assert ALONE.is_main
    assert not _read(SLURM).is_main
    assert _read(TORCHRUN).variables == TORCHRUN


@pytest.mark.parametrize(
    ("whole", "missing"),
    [
        *((TORCHRUN, name) for name in LAUNCHER_NAMES if name != "MASTER_ADDR"),
        *((OPEN_MPI, name) for name in list(OPEN_MPI)[:4]),
        *((MPICH, name) for name in list(MPICH)[:4]),
        *((SLURM, name) for name in SLURM if name.startswith("SLURM_STEP_") and name[11:] not in ("ID", "NUM_NODES")),
        *((SLURM, name) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID")),
        (TORCHRUN, "MASTER_ADDR"),
    ],
)
def test_f114_half_a_launcher_is_an_error(whole: dict[str, str], missing: str) -> None:
    with pytest.raises(ConfigError, match="not set, but") as caught:
        _read({name: text for name, text in whole.items() if name != missing})
    assert caught.value.field == missing


def test_f114_parts_without_any_rank_are_an_error() -> None:
    for environ in (ADDRESS, {"WORLD_SIZE": "2"}):
        with pytest.raises(ConfigError, match="not set, but"):
            _read(environ)
    for name in ADDRESS:
        with pytest.raises(ConfigError, match="not set, but"):
            _read({**OPEN_MPI, name: ADDRESS[name]})


@pytest.mark.parametrize(
    ("whole", "change", "reason"),
    [
        (TORCHRUN, {"RANK": "x"}, "not a whole number"),
        (TORCHRUN, {"RANK": "-1"}, "not a whole number"),
        (TORCHRUN, {"RANK": "²"}, "not a whole number"),
        (TORCHRUN, {"MASTER_PORT": "http"}, "not a whole number"),
        (TORCHRUN, {"MASTER_PORT": "99999"}, "no port is above 65535"),
        (TORCHRUN, {"RANK": "8"}, "must be below WORLD_SIZE=8"),
        (TORCHRUN, {"LOCAL_RANK": "4"}, "must be below LOCAL_WORLD_SIZE=4"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "9"}, "exceeds WORLD_SIZE=8"),
        (OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "8"}, "must be below OMPI_COMM_WORLD_SIZE=8"),
        (MPICH, {"MPI_LOCALRANKID": "4"}, "must be below MPI_LOCALNRANKS=4"),
        (OPEN_MPI, {"WORLD_SIZE": "4"}, "contradicts OMPI_COMM_WORLD_SIZE, by which Open MPI started 8"),
        (SLURM, {"WORLD_SIZE": "8"}, "contradicts SLURM_STEP_NUM_TASKS, by which Slurm started 5"),
        (SLURM, {"LOCAL_WORLD_SIZE": "8"}, "contradicts SLURM_STEP_TASKS_PER_NODE, by which Slurm started 2"),
        (SLURM, {"SLURM_PROCID": "5"}, "must be below SLURM_STEP_NUM_TASKS=5"),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "contradicts SLURM_STEP_NUM_TASKS=5"),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "two"}, "is no list of counts"),
        (SLURM, {"SLURM_NODEID": "3"}, "contradicts SLURM_STEP_NUM_TASKS=5, SLURM_NODEID=3"),
        (SLURM, {"SLURM_STEP_NODELIST": "gpu[07"}, "is no list of hosts"),
        (SLURM, {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "starts with gpu07, and rank 0 runs on gpu08"),
        # srun per rank, with what a script for torchrun exports for all of its tasks.
        (SLURM, {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}, "contradicts SLURM_PROCID=3 of SLURM_STEP_NUM_TASKS=5"),
        (OPEN_MPI, {**TORCHRUN, "RANK": "0"}, "contradicts OMPI_COMM_WORLD_RANK=5"),
        # The shell of a batch job is no task.
        (BATCH_SHELL, {"SLURM_NTASKS": "16"}, "srun did not start this process"),
        (BATCH_SHELL, {"SLURM_PROCID": "3"}, "srun did not start this process"),
    ],
)
def test_contradictions(whole: dict[str, str], change: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        _read({**whole, **change})


@pytest.mark.parametrize("field", ["SLURM_STEP_NODELIST", "MASTER_ADDR"])
def test_f114_an_unresolvable_head_node_is_an_error(field: str) -> None:
    with pytest.raises(ConfigError, match="the head node nowhere cannot be resolved") as caught:
        _read({**SLURM, field: "nowhere"})
    assert caught.value.field == field


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_f114_several_nodes_do_not_meet_on_this_machine(address: str) -> None:
    with pytest.raises(ConfigError, match="is this machine, and the Slurm step runs on 3 nodes"):
        _read({**SLURM, "MASTER_ADDR": address})


def test_f114_a_torchrun_on_each_node_that_knows_no_other_is_an_error() -> None:
    alone = {**TORCHRUN, "RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "a"}
    assert _read(alone).world_size == 4
    with pytest.raises(ConfigError, match="a world of this node alone, and the Slurm step runs on 3 nodes"):
        _read({**SLURM, **alone})
    assert _read({**SLURM, **alone, "SLURM_STEP_NUM_NODES": "1"}).world_size == 4


def test_f114_the_entry_point_says_so_and_leaves() -> None:
    step = {**SLURM, "SLURM_STEP_NODELIST": "no-such-host.invalid,gpu08"}
    command = [sys.executable, str(ROOT / "pretrain_gpt.py")]
    outcome = subprocess.run(command, env=environment(**step), capture_output=True, text=True, timeout=120, check=False)
    assert outcome.returncode == 2
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: SLURM_STEP_NODELIST=no-such-host.invalid,gpu08: the head node no-such-host.invalid ")


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[1-2]", "node1"),
        ("node[007,009-012],login1", "node007"),
        ("rack[3-4]node[1,5]-ib,x", "rack3node1-ib"),
        ("a-b.example.org", "a-b.example.org"),
    ],
)
def test_the_first_host_of_a_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["[", "node[1-2", "node]1[", "node[]", " "])
def test_what_is_no_list_of_hosts(nodelist: str) -> None:
    with pytest.raises(ConfigError, match="is no list of hosts"):
        first_host(nodelist)
