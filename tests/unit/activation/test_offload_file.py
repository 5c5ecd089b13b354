"""The file holds what was written, leaves nothing behind, and explains what it cannot do."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket

import numpy as np
import pytest

from megatron_glue.activation import offload_file
from megatron_glue.activation.extents import ALIGNMENT_BYTES
from megatron_glue.activation.offload_file import FILE_PREFIX, OffloadFile, allocate_pages


def pages(num_pages: int, value: int) -> np.ndarray:
    array = np.frombuffer(allocate_pages(num_pages * ALIGNMENT_BYTES), dtype=np.uint8)
    array[:] = value
    return array


@pytest.mark.parametrize("is_direct_io_refused", [False, True])
def test_reads_what_was_written(tmp_path, monkeypatch, is_direct_io_refused):
    if is_direct_io_refused:
        real = fcntl.fcntl

        def refuse(descriptor, command, argument=0):
            if command == fcntl.F_SETFL and argument & os.O_DIRECT:
                raise OSError(errno.EINVAL, "refused")
            return real(descriptor, command, argument)

        monkeypatch.setattr(fcntl, "fcntl", refuse)
    file = OffloadFile(tmp_path / "new" / "folder")
    if is_direct_io_refused:
        assert not file.direct
    file.reserve(4 * ALIGNMENT_BYTES)
    assert file.num_bytes == 4 * ALIGNMENT_BYTES
    file.write(pages(1, 7), ALIGNMENT_BYTES)
    file.write(pages(2, 9), 2 * ALIGNMENT_BYTES)
    back = pages(3, 0)
    file.read(back, ALIGNMENT_BYTES)
    assert (back == np.repeat([7, 9, 9], ALIGNMENT_BYTES)).all()
    file.close()
    file.close()


def test_short_transfers_continue_at_a_sector(tmp_path, monkeypatch):
    file = OffloadFile(tmp_path)
    real = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda fd, parts, offset: real(fd, [parts[0][:ALIGNMENT_BYTES]], offset) - 0 * len(parts)
    )
    source = pages(3, 1)
    source[ALIGNMENT_BYTES:] = 2
    file.write(source, 0)
    back = pages(3, 0)
    file.read(back, 0)
    assert (back == source).all()
    file.close()


def test_nothing_has_a_name_and_leftovers_of_killed_runs_are_removed(tmp_path):
    leftover = tmp_path / f"{FILE_PREFIX}-{socket.gethostname()}-killed"
    elsewhere = tmp_path / f"{FILE_PREFIX}-another.machine-running"
    mine = tmp_path / "results.txt"
    for path in (leftover, elsewhere, mine):
        path.write_text("x")
    first, second = OffloadFile(tmp_path), OffloadFile(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([elsewhere, mine])
    for file, value in ((first, 1), (second, 2)):
        file.write(pages(1, value), 0)
    back = pages(1, 0)
    first.read(back, 0)
    assert (back == 1).all(), "a second file in the folder leaves the first alone"
    first.close()
    second.close()


def test_full_disk_is_reported_when_room_is_reserved(tmp_path):
    file = OffloadFile(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match="activations cannot be offloaded") as caught:
            file.reserve(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path)
    assert os.strerror(errno.EFBIG) in str(caught.value)
    file.close()


def test_filesystem_without_reservation_still_works(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    file = OffloadFile(tmp_path)
    file.reserve(ALIGNMENT_BYTES)
    file.write(pages(1, 3), 0)
    file.close()


def test_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError) as caught:
        OffloadFile(tmp_path / "file")
    assert caught.value.filename == str(tmp_path / "file")
    assert caught.value.strerror == os.strerror(errno.EEXIST), "whoever asked for the folder adds what to do"


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        ("d / ext4 rw 0 0\n", False),
        ("d / ext4 rw 0 0\nt {folder} tmpfs rw 0 0\n", True),
        ("d / ext4 rw 0 0\nr {parent} ramfs rw 0 0\n", True),
        ("t {folder} tmpfs rw 0 0\nd {folder} ext4 rw 0 0\n", False),
        ("t / tmpfs rw 0 0\nd {parent} ext4 rw 0 0\n", False),
        ("t {folder}er tmpfs rw 0 0\n", False),
        (None, False),
    ],
)
def test_ram_disks_are_known_by_their_mount(tmp_path, monkeypatch, mounts, expected):
    folder = tmp_path / "a folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    if mounts is not None:
        written = mounts.format(folder=str(folder).replace(" ", "\\040"), parent=tmp_path)
        (tmp_path / "mounts").write_text(written)
    monkeypatch.setattr(offload_file, "MOUNTS", tmp_path / "mounts")
    assert offload_file.lies_in_memory(folder) is expected
    assert offload_file.lies_in_memory(tmp_path / "link") is expected
