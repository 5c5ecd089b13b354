"""A real Slurm of several nodes on this machine: one controller, one slurmd per node, nothing written outside a folder.

Each slurmd lives in namespaces of its own for host name and mounts, with an ``/etc/hosts`` that gives every node a
loopback address; so nodes have names that resolve among them, as in a cluster, and share files and processors. Needs
root and Debian's packages slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from megatron_glue.parallel.local_ranks import free_port
from megatron_glue.proofs.local_jobs import wait_until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "unshare")
CLIENT_TIMEOUT_S = 20

_SETTINGS = """
ClusterName=test
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait=20
"""


def missing_for_slurm() -> str | None:
    """Why no cluster can be started here; ``None`` if one can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurmctld slurmd slurm-client munge)"
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    if subprocess.run(["unshare", "-m", "-u", "true"], capture_output=True, check=False).returncode:
        return "this machine allows no namespaces (unshare -m -u), so nodes cannot have names of their own"
    return None


def _path() -> str:
    return f"{os.environ['PATH']}{os.pathsep}/usr/sbin"


class SlurmCluster:
    """A running cluster.

    Two partitions: ``main``, and ``high``, whose jobs preempt those of ``main``: they get SIGTERM, 20 s, and the queue.

    Args:
        num_nodes: Nodes, called node1, node2, ...

    Attributes:
        environ: What a client needs in its environment.
    """

    def __init__(self, num_nodes: int) -> None:
        # Not pytest's folder: the path of a Unix socket has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.nodes = [f"node{index}" for index in range(1, num_nodes + 1)]
        self.environ = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemon_environ = {**os.environ, **self.environ, "PATH": _path()}
        try:
            self._write_files()
            self._start()
        except BaseException:
            self.close()
            raise

    def client(self, *words: str, **environ: str) -> str:
        """Run a client command (sbatch, scontrol, ...) and return what it says."""
        outcome = subprocess.run(
            words,
            env={**os.environ, **self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=CLIENT_TIMEOUT_S,
            check=False,
        )
        assert outcome.returncode == 0, f"{words}: {outcome.stderr}\n{self._logs()}"
        return outcome.stdout

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of a job: JobState, ExitCode, Restarts, ..."""
        words = self.client("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, number: str, *states: str, timeout_s: float = 90) -> None:
        """Wait until a job has one of these states."""
        self.wait(lambda: self.job(number)["JobState"] in states, f"job {number} became none of {states}", timeout_s)

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = 90) -> None:
        """Wait for a condition; fail with the daemons' logs."""
        if not wait_until(condition, timeout_s):
            raise AssertionError(f"{what}\n{self.client('squeue', '--all')}\n{self._logs()}")

    def start_requeued(self, number: str) -> None:
        """Start a requeued job soon; Slurm would hold it back for two minutes."""
        self.wait_for_state(number, "PENDING")
        # Within the same second as the end of its former life, a node would take it for that one, and refuse it.
        self.client("scontrol", "update", f"jobid={number}", "StartTime=now+3")

    def processes(self, text: str) -> list[str]:
        """Command lines that jobs of this cluster run now and that contain a text."""
        return [line for _, line in self._processes(b"SLURMD_NODENAME=") if text in line]

    def close(self) -> None:
        """End jobs, daemons and what jobs left behind, and remove the folder."""
        with suppress(AssertionError, subprocess.TimeoutExpired, OSError):
            self.client("scancel", "--full", "--user=root", "--signal=KILL")
        for daemon in ("slurmctld", *(f"slurmd-{node}" for node in self.nodes), "munged"):
            self._end_daemon(self.folder / f"{daemon}.pid")
        # What loses its parent escapes the daemons here, as they track processes by their parents only; and the keepers
        # of steps outlive slurmd, by design.
        for process, _ in self._processes(b"SLURM_CONF="):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_files(self) -> None:
        host = socket.gethostname().split(".")[0]
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(256))
        addresses = {node: f"127.0.0.{index}" for index, node in enumerate(self.nodes, 11)}
        hosts = {"localhost": "127.0.0.1", host: "127.0.0.1", **addresses}
        (self.folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
        # No name server: torchrun looks addresses up in reverse, and each question would wait for its timeout.
        (self.folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        # Some machines have no control groups to be asked about.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        lines = [_SETTINGS.format(folder=self.folder).strip()]
        lines += [f"SlurmctldHost={host}(127.0.0.1)", f"SlurmctldPort={free_port()}"]
        lines += [
            f"NodeName={node} NodeHostname={node} NodeAddr={address} Port={free_port()} CPUs={os.cpu_count()}"
            for node, address in addresses.items()
        ]
        lines += [
            "PartitionName=main Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20",
            "PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF",
        ]
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")

    def _start(self) -> None:
        folder = self.folder
        self._daemon(
            *("munged", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"),
            *(f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed"),
        )
        self._daemon("slurmctld", "-c")
        for node in self.nodes:
            steps = (
                f"hostname {node}",
                *(f"mount --bind {folder / name} /etc/{name}" for name in ("hosts", "nsswitch.conf")),
                f"exec slurmd -N {node}",
            )
            self._daemon("unshare", "-m", "-u", "sh", "-c", " && ".join(steps))
        # A node is shown as idle before it has answered: what counts is that a job runs on all of them.
        self.wait(self._runs_a_job, "the nodes did not come up", timeout_s=30)

    def _runs_a_job(self) -> bool:
        command = ["srun", "--quiet", f"--nodes={len(self.nodes)}", "--immediate=2", "true"]
        environ = {**os.environ, **self.environ}
        with suppress(subprocess.TimeoutExpired):
            return not subprocess.run(command, env=environ, capture_output=True, timeout=10, check=False).returncode
        return False

    def _daemon(self, *words: str) -> None:
        # It goes into the background by itself, keeping what it was given: no pipe to this process.
        outcome = subprocess.run(
            words,
            env=self._daemon_environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=CLIENT_TIMEOUT_S,
            check=False,
        )
        assert outcome.returncode == 0, f"{words}\n{self._logs()}"

    def _end_daemon(self, pid_file: Path) -> None:
        try:
            process = int(pid_file.read_text())
            name = pid_file.stem.split("-")[0]
            for number in (signal.SIGTERM, signal.SIGKILL):
                if not Path(f"/proc/{process}/comm").read_text().startswith(name):
                    return
                os.kill(process, number)
                if wait_until(lambda: not Path(f"/proc/{process}").exists(), 5.0):
                    return
        except (OSError, ValueError):
            return

    def _processes(self, variable: bytes) -> Iterator[tuple[int, str]]:
        """Processes of this cluster that have a variable in their environment, and their command lines."""
        own = f"SLURM_CONF={self.environ['SLURM_CONF']}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                environ = (path / "environ").read_bytes().split(b"\0")
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if own in environ and any(text.startswith(variable) for text in environ):
                yield int(path.name), line

    def _logs(self) -> str:
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-15:]
            parts.append("\n".join((f"-- {path.name} at {time.strftime('%H:%M:%S')}", *tail)))
        return "\n".join(parts)
