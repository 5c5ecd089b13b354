"""Launchers start what they are given, with as many processes as they are told, and say what they miss."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_glue.parallel.local_ranks import free_port
from tests.support.commands import ROOT, environment

SCRIPTS = sorted(path for path in (ROOT / "scripts").rglob("*") if path.suffix in (".sh", ".sbatch", ".pbs", ".lsf"))
CHECKED = [*SCRIPTS, ROOT / ".ci/run", ROOT / "tools/bench/gpu.sh"]
SHOWS_PLACE = (
    "import os, sys\n"
    "place = ' '.join(os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'))\n"
    # One write per rank: unbuffered, print would send a line and its end apart, and the ranks' would mix.
    "os.write(1, f'rank {place} {sys.argv[1:]}\\n'.encode())\n"
)
WITH_PYTHON = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def _environ(**extra: str) -> dict[str, str]:
    """This environment without what a job around the test may have left."""
    kept = {name: text for name, text in environment().items() if not name.startswith(("SLURM", "MASTER_", "NPROC"))}
    return {**kept, "PATH": WITH_PYTHON, **extra}


def _stand_in(path: Path, text: str) -> None:
    """Put a shell script where a program is looked for."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def _run(script: str, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / script), *words]
    return subprocess.run(command, env=_environ(**extra), capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(SHOWS_PLACE)
    return path


@pytest.mark.parametrize("script", CHECKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_scripts_are_sound(script: Path) -> None:
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    assert script.suffix not in (".sh", ".sbatch") or os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    command = ["shellcheck", "--shell=bash", "-x", *map(str, CHECKED)]
    outcome = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert outcome.returncode == 0, outcome.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_presets_that_a_script_names_exist(script: Path) -> None:
    for name in re.findall(r"examples/[\w/.]+\.yaml", script.read_text()):
        assert (ROOT / name).exists(), name


def test_train_single_starts_one_process_per_nproc(program: Path) -> None:
    outcome = _run("train_single.sh", str(program), "--flag", "two words", NPROC="2")
    assert outcome.returncode == 0, outcome.stderr
    lines = sorted(line for line in outcome.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} {rank} 2 ['--flag', 'two words']" for rank in range(2)]


def test_train_multi_node_makes_one_world_of_two_nodes(program: Path) -> None:
    command = [str(ROOT / "scripts/train_multi_node.sh"), str(program), "a b"]
    # A name that files know: torchrun looks addresses up in reverse, and a name server may let it wait for long.
    environ = _environ(HEAD_NODE=socket.gethostname(), HEAD_PORT=str(free_port()), NNODES="2", NPROC="1")
    nodes = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        lines = [line for node in nodes for line in node.communicate(timeout=120)[0].splitlines() if "rank" in line]
    finally:
        for node in nodes:
            node.kill()
    assert sorted(lines) == [f"rank {rank} 0 2 ['a b']" for rank in range(2)]


@pytest.mark.parametrize(("wait_s", "code"), [("20", 0), ("0", 2)])
def test_train_multi_node_waits_for_a_name_that_comes_later(wait_s: str, code: int, tmp_path: Path) -> None:
    """As in a cluster whose first pod starts last."""
    tries = tmp_path / "tries"
    for name, text in (
        ("getent", f"echo >>{tries}; [ $(wc -l <{tries}) -gt 2 ]"),
        ("torchrun", 'echo "started $*"'),
    ):
        _stand_in(tmp_path / name, text)
    extra = {"HEAD_NODE": "late-0.late", "NNODES": "2", "NPROC": "8", "RUN_ID": "7", "HEAD_WAIT_S": wait_s}
    outcome = _run("train_multi_node.sh", "pretrain_gpt.py", **extra, PATH=f"{tmp_path}{os.pathsep}{WITH_PYTHON}")
    assert outcome.returncode == code, outcome.stderr
    assert ("--rdzv-endpoint late-0.late:29400 --rdzv-id 7" in outcome.stdout) == (code == 0)


@pytest.mark.parametrize(
    ("script", "extra", "reason"),
    [
        ("train_multi_node.sh", {}, "HEAD_NODE: not set"),
        ("train_multi_node.sh", {"HEAD_NODE": "gpu01"}, "NNODES=: not a number of machines"),
        ("train_multi_node.sh", {"HEAD_NODE": "gpu01", "NNODES": "two"}, "NNODES=two: not a number"),
        ("train_multi_node.sh", {"HEAD_NODE": "localhost", "NNODES": "2"}, "each of the 2 machines would wait"),
        ("train_multi_node.sh", {"HEAD_NODE": "a.invalid", "NNODES": "2", "NPROC": "1"}, "cannot be resolved"),
        (
            "train_multi_node.sh",
            {"HEAD_NODE": "gpu01", "NNODES": "2", "NPROC": "1", "HEAD_WAIT_S": "soon"},
            "HEAD_WAIT_S=soon: not a number of seconds",
        ),
        ("mpi/train.sh", {}, "NP=: not a number of processes"),
        ("mpi/train.sh", {"NP": "2", "HOSTFILE": "/no/such/file"}, "HOSTFILE=/no/such/file: cannot be read"),
        ("slurm/job.sh", {}, "SLURM_JOB_ID: not set"),
    ],
)
def test_what_is_missing_is_said(script: str, extra: dict[str, str], reason: str) -> None:
    outcome = _run(script, "pretrain_gpt.py", **extra)
    assert outcome.returncode == 2
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    assert reason in line


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "no-such-node[1-2]", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("hosts", "extra", "reason"),
    [
        (None, {}, "NPROC=: not a number of ranks, and the job asked for no GPUs"),
        (None, {"NPROC": "8"}, "scontrol does not name its hosts here"),
        ("", {"NPROC": "8"}, "scontrol does not name its hosts here"),
        ("no-such-node1.invalid", {"NPROC": "8"}, "the head node no-such-node1.invalid cannot be resolved"),
        ("127.0.0.2", {"NPROC": "8", "LAUNCH": "mpirun"}, "LAUNCH=mpirun: neither torchrun nor srun"),
        ("127.0.0.2", {"NPROC": "8", "MASTER_ADDR": "no-such-head.invalid"}, "no-such-head.invalid cannot be resolved"),
    ],
)
def test_f114_a_job_that_cannot_find_its_head_node_ends(
    hosts: str | None, extra: dict[str, str], reason: str, tmp_path: Path
) -> None:
    """Without scontrol, as in a container, it must not go on with this machine as everybody's head."""
    for name in ("bash", "env", "getent", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    if hosts is not None:
        _stand_in(tmp_path / "scontrol", f"echo '{hosts}'")
    outcome = _run("slurm/job.sh", "pretrain_gpt.py", **JOB, **extra, PATH=str(tmp_path))
    assert outcome.returncode == 2
    assert reason in outcome.stderr.splitlines()[-1]


def test_a_job_puts_its_container_around_the_guard_and_the_ranks(tmp_path: Path) -> None:
    """The shell that ignores signals must be inside, next to torchrun."""
    for name, text in (("scontrol", "echo 127.0.0.2"), ("srun", 'echo "$@"')):
        _stand_in(tmp_path / name, text)
    extra = {"NPROC": "8", "SRUN_FLAGS": "--container-image=/glue.sqsh", "CONTAINER": "apptainer exec --nv glue.sif"}
    path = f"{tmp_path}{os.pathsep}{WITH_PYTHON}"
    outcome = _run("slurm/job.sh", "pretrain_gpt.py", "--save", "/shared/run", **JOB, **extra, PATH=path)
    assert outcome.returncode == 0, outcome.stderr
    flags, _, command = outcome.stdout.partition(" --container-image=/glue.sqsh ")
    assert flags.endswith("--kill-on-bad-exit=1")
    guard = 'bash -c trap "" USR1 TERM; exec "$@" bash'
    assert command.startswith(f"apptainer exec --nv glue.sif {guard} torchrun --nnodes 2")
    assert command.endswith("pretrain_gpt.py --save runs/job-7 --save /shared/run\n")


def test_a_batch_script_outside_the_checkout_says_so(tmp_path: Path) -> None:
    for name in ("pretrain_gpt", "pretrain_moe"):
        outcome = _run(f"slurm/{name}.sbatch", SLURM_SUBMIT_DIR=str(tmp_path))
        assert outcome.returncode == 2
        assert "holds no scripts/slurm/job.sh" in outcome.stderr


@pytest.mark.parametrize(
    ("script", "extra", "program", "words"),
    [
        (
            "pbs/pretrain.pbs",
            {"PBS_JOBID": "12.server", "PBS_O_WORKDIR": str(ROOT), "PBS_NODEFILE": "nodes"},
            "mpirun",
            ["-n 16", "-f nodes", "python pretrain_moe.py", "--save runs/pretrain_moe-12"],
        ),
        (
            "lsf/pretrain.lsf",
            {"LSB_JOBID": "12", "LSB_HOSTS": "gpu3 gpu1"},
            "blaunch",
            ["HEAD_NODE=gpu3 NNODES=2 NPROC=8 RUN_ID=12 HEAD_PORT=10012", "train_multi_node.sh pretrain_moe.py"],
        ),
    ],
)
def test_templates_start_one_world(
    script: str, extra: dict[str, str], program: str, words: list[str], tmp_path: Path
) -> None:
    """With the scheduler's variables as documented, and its launcher replaced by one that shows what it gets."""
    (tmp_path / "nodes").write_text("gpu1\n" * 8 + "gpu2\n" * 8)
    _stand_in(tmp_path / program, 'printf "%s " "$@"')
    extra = {name: str(tmp_path / text) if text == "nodes" else text for name, text in extra.items()}
    command = ["bash", str(ROOT / "scripts" / script)]
    environ = _environ(**extra, PATH=f"{tmp_path}{os.pathsep}{WITH_PYTHON}")
    outcome = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert outcome.returncode == 0, outcome.stderr
    for word in words:
        assert word.replace("nodes", str(tmp_path / "nodes")) in outcome.stdout


@pytest.fixture
def releases(tmp_path: Path) -> dict[str, str]:
    """Two checkouts with environments of their own, whose python says which it is."""
    for name in ("stable", "canary"):
        (tmp_path / name / ".venv/bin").mkdir(parents=True)
        (tmp_path / name / "pretrain_moe.py").touch()
        _stand_in(tmp_path / name / ".venv/bin/python", f'echo {name} "$PWD" "$REPO" "$@"')
    return {"STABLE": str(tmp_path / "stable"), "CANARY": str(tmp_path / "canary")}


def _chosen(releases: dict[str, str], percent: int) -> list[str]:
    """Releases that 30 jobs start with."""
    outcomes = [_run("canary.sh", f"job-{at}", "python", "x", PERCENT=str(percent), **releases) for at in range(30)]
    assert all(outcome.returncode == 0 for outcome in outcomes)
    return [outcome.stdout.split()[0] for outcome in outcomes]


def test_a_share_of_jobs_is_canary_and_a_job_stays_where_it_is(releases: dict[str, str]) -> None:
    few, many = _chosen(releases, 20), _chosen(releases, 60)
    assert 0 < few.count("canary") < many.count("canary") < 30
    assert few == _chosen(releases, 20), "a restart chooses the same"
    assert all(later == "canary" for now, later in zip(few, many, strict=True) if now == "canary")
    assert set(_chosen(releases, 0)) == {"stable"}
    assert set(_chosen(releases, 100)) == {"canary"}
    place = int(hashlib.sha256(b"a job").hexdigest()[:8], 16) % 100
    for percent, release in ((place, "stable"), (place + 1, "canary")):
        assert _run("canary.sh", "a job", "python", PERCENT=str(percent), **releases).stdout.startswith(release)


def test_a_canary_starts_in_its_own_checkout(releases: dict[str, str]) -> None:
    outcome = _run("canary.sh", "a job", "python", "--lr", "a b", PERCENT="100", **releases)
    place = releases["CANARY"]
    assert outcome.stdout == f"canary {place} {place} --lr a b\n"
    assert "job a job: canary" in outcome.stderr


@pytest.mark.parametrize(
    ("words", "extra", "reason"),
    [
        (["job"], {}, "needs the name of a job and its command"),
        (["job", "python"], {"PERCENT": "101"}, "PERCENT=101: is not a number from 0 to 100"),
        (["job", "python"], {"PERCENT": "-5"}, "PERCENT=-5: is not a number"),
        (["job", "python"], {"CANARY": ""}, "CANARY: is not set"),
        (["job", "python"], {"STABLE": "/nowhere"}, "STABLE=/nowhere: holds no pretrain_moe.py"),
    ],
)
def test_a_wrong_canary_is_one_line(
    words: list[str], extra: dict[str, str], reason: str, releases: dict[str, str]
) -> None:
    outcome = _run("canary.sh", *words, **{**releases, **extra})
    assert outcome.returncode == 2
    (line,) = outcome.stderr.splitlines()
    assert reason in line
