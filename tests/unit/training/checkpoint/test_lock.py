"""One run per folder: refused, waited for, and let go of by a process that is killed."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.training.checkpoint import lock as lock_module
from megatron_glue.training.checkpoint.lock import FolderLock, FolderTakenError
from tests.support.toy_run import Run

HOLDER = (
    "import sys, time; from pathlib import Path; from megatron_glue.training.checkpoint.lock import FolderLock\n"
    "lock = FolderLock(Path(sys.argv[1])); lock.acquire(); print('held', flush=True); time.sleep(60)\n"
)


def test_a_second_holder_is_refused_and_the_next_is_not(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    with pytest.raises(FolderTakenError):
        second.acquire(0.2)
    second.release()
    assert (tmp_path / ".lock").exists(), "who holds nothing removes nothing"
    first.release()
    assert list(tmp_path.iterdir()) == []
    second.acquire(0)
    second.release()


def test_a_holder_that_ends_soon_is_waited_for(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    threading.Timer(0.3, first.release).start()
    second.acquire(30)
    with pytest.raises(FolderTakenError):
        first.acquire(0)
    second.release()


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(FolderTakenError):
            FolderLock(tmp_path).acquire(0)
        process.kill()
    assert (tmp_path / ".lock").exists()
    lock = FolderLock(tmp_path)
    lock.acquire(0)
    lock.release()


def test_a_file_that_was_removed_meanwhile_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking it, its holder may have released it, and a third run have made a new one."""
    real, third = fcntl.flock, FolderLock(tmp_path)

    def flock(handle: int, operation: int) -> None:
        monkeypatch.setattr(lock_module.fcntl, "flock", real)
        (tmp_path / ".lock").unlink()
        third.acquire(0)
        real(handle, operation)

    monkeypatch.setattr(lock_module.fcntl, "flock", flock)
    with pytest.raises(FolderTakenError):
        FolderLock(tmp_path).acquire(0.2)
    third.release()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_filesystem_without_locks_is_told_and_no_obstacle(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(_handle: int, _operation: int) -> None:
        raise OSError(code, "No locks available")

    monkeypatch.setattr(lock_module.fcntl, "flock", flock)
    for lock in (FolderLock(tmp_path), FolderLock(tmp_path)):
        lock.acquire(0)
        lock.release()
    assert f"{tmp_path}: this filesystem knows no locks (No locks available)" in caplog.text


def test_a_store_claims_its_folder_before_anything_in_it_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderLock.acquire, "__defaults__", (0.0,))
    first, second = Run(tmp_path).store, Run(tmp_path).store
    first.claim()
    (tmp_path / "latest.tmp").write_text("of the first run\n")
    with pytest.raises(ConfigError, match=r"--save=.*: another run writes into it; wait for its end, or choose ano"):
        second.claim()
    assert (tmp_path / "latest.tmp").exists()
    second.prepare()
    first.release()
    second.claim()
    second.release()
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match=r"--save=.*: cannot be written: Is a directory"):
        second.claim()
