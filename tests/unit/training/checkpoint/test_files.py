"""Folders, the manifest, publishing and pruning, without tensors."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.training.checkpoint import files
from megatron_glue.training.checkpoint.files import CheckpointError


def write(root: Path, step: int, data: bytes = b"weights") -> Path:
    folder = files.start_folder(root, step)
    (folder / "data").write_bytes(data)
    files.write_manifest(folder, files.describe_files([folder / "data"]))
    return files.publish(folder)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_names_of_steps() -> None:
    assert files.step_folder(Path("runs"), 42) == Path("runs/step_00000042")
    assert files.step_of("step_00000042") == 42
    assert files.step_of("step_123456789") == 123456789
    assert files.step_of(f"step_{2**62 - 1}") == 2**62 - 1
    for other in ("step_00000042.incomplete", "step_42", "latest", "../step_00000042"):
        assert files.step_of(other) is None
    for unusual in ("step_000000042", f"step_{2**62}", "step_" + "9" * 5000, "step_٠٠٠٠٠٠٤٢"):
        assert files.step_of(unusual) is None, unusual


def test_folders_of_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    write(tmp_path, 3)
    for name in ("step_000000009", f"step_{2**62}"):
        shutil.copytree(tmp_path / "step_00000003", tmp_path / name)
    assert files.published_steps(tmp_path) == [3]


def test_publish_names_the_step_and_leaves_nothing_else(tmp_path: Path) -> None:
    assert files.latest_step(tmp_path / "missing") is None
    folder = write(tmp_path, 3)
    assert names(tmp_path) == ["latest", "step_00000003"]
    assert (tmp_path / "latest").read_text() == "step_00000003\n"
    assert files.latest_step(tmp_path) == 3
    assert files.named_step(tmp_path) == 3
    files.verify_files(folder)


def test_json_has_a_line_per_entry_and_one_for_a_whole_history() -> None:
    facts = {"losses": [0.1 * step for step in range(1000)], "empty": {}, "model": {"a b": None, "c": [{"d": 1}, True]}}
    text = files.to_json(facts)
    assert json.loads(text) == facts
    assert len(text.splitlines()) == len(["{", "losses", "empty", "model", "a b", "c", "}", "}"])


def test_unpublished_and_empty_folders_are_no_checkpoints(tmp_path: Path) -> None:
    write(tmp_path, 3)
    files.start_folder(tmp_path, 7)
    (tmp_path / "step_00000009").mkdir()
    assert files.latest_step(tmp_path) == 3


def test_latest_decides_and_a_useless_one_is_passed_over(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "latest").write_text("step_00000002\n")
    assert files.latest_step(tmp_path) == 2
    for useless in ("step_00000099\n", "../../etc", ""):
        (tmp_path / "latest").write_text(useless)
        assert files.latest_step(tmp_path) == 3
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    assert files.latest_step(tmp_path) == 3
    (tmp_path / "latest").unlink()
    assert files.latest_step(tmp_path) == 3


def test_leftovers_of_dead_writers_go_when_the_next_save_starts(tmp_path: Path) -> None:
    (files.start_folder(tmp_path, 5) / "half").write_bytes(b"x")
    write(tmp_path, 6)
    assert names(tmp_path) == ["latest", "step_00000006"]


def test_prune_keeps_the_newest_and_what_lies_ahead(tmp_path: Path) -> None:
    for step in (1, 2, 3, 9):
        write(tmp_path, step)
    files.prune(tmp_path, 2, 3)
    assert names(tmp_path) == ["latest", "step_00000002", "step_00000003", "step_00000009"]


def linked(root: Path, name: str) -> Path:
    """A link of this name to a folder elsewhere, which is returned."""
    elsewhere = root.parent / f"elsewhere-{name}"
    if (root / name).exists():
        (root / name).rename(elsewhere)
    else:
        elsewhere.mkdir()
        (elsewhere / "data").write_bytes(b"mine")
    (root / name).symlink_to(elsewhere)
    return elsewhere


def test_links_are_removed_and_never_what_they_lead_to(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step in (1, 2):
        write(root, step)
    kept = [linked(root, name) for name in ("step_00000001", "step_00000002", "step_00000007.incomplete")]
    (root / "step_00000005").symlink_to(tmp_path / "nowhere")
    write(root, 2, b"anew")
    write(root, 5)
    files.prune(root, 2, 5)
    assert names(root) == ["latest", "step_00000002", "step_00000005"]
    assert not any(path.is_symlink() for path in root.iterdir())
    assert [(path / "data").read_bytes() for path in kept] == [b"weights", b"weights", b"mine"]


@pytest.mark.parametrize("name", ["step_00000001.incomplete", "step_00000001.replaced.incomplete", "step_00000001"])
def test_a_stray_file_is_no_obstacle(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"stray")
    write(tmp_path, 1)
    assert names(tmp_path) == ["latest", "step_00000001"]
    files.verify_files(tmp_path / "step_00000001")


def go_back(root: Path) -> None:
    write(root, 1)
    write(root, 2, b"old course")
    (root / "latest").write_text("step_00000001\n")


def test_a_step_of_a_course_that_was_given_up_is_written_anew(tmp_path: Path) -> None:
    go_back(tmp_path)
    folder = write(tmp_path, 2, b"new course")
    assert (folder / "data").read_bytes() == b"new course"
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]


def test_the_old_course_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    """A disk that runs full after going back costs the new checkpoint only."""
    go_back(tmp_path)
    (files.start_folder(tmp_path, 2) / "half").write_bytes(b"x")
    files.verify_files(tmp_path / "step_00000002")
    assert (tmp_path / "step_00000002/data").read_bytes() == b"old course"


def test_an_old_course_is_put_back_if_the_new_one_does_not_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_back(tmp_path)
    real, calls = Path.rename, []

    def fail(path: Path, target: Path) -> Path:
        calls.append(path.name)
        if path.name == "step_00000002.incomplete":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(PermissionError):
            write(tmp_path, 2, b"new course")
    assert calls == ["step_00000002", "step_00000002.incomplete", "step_00000002.replaced.incomplete"]
    assert (tmp_path / "step_00000002/data").read_bytes() == b"old course"


def test_what_was_killed_between_the_two_renames_is_put_back_at_the_next_start(tmp_path: Path) -> None:
    go_back(tmp_path)
    (tmp_path / "step_00000002").rename(tmp_path / "step_00000002.replaced.incomplete")
    files.check_writable(tmp_path)
    assert (tmp_path / "step_00000002/data").read_bytes() == b"old course"


def at_rename(monkeypatch: pytest.MonkeyPatch, source: str, action: Exception) -> None:
    """Let something happen instead of the rename of a file or folder."""
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == source:
            raise action
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)


class Killed(BaseException):
    """Nothing of the process runs after it."""


def kill_before_latest_moves(root: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        at_rename(patch, "latest.tmp", Killed())
        with pytest.raises(Killed):
            write(root, step)


def test_a_full_disk_cannot_come_between_publishing_and_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written once a folder has its name."""
    write(tmp_path, 1)
    real = files.write_durably

    def full(path: Path, data: bytes) -> None:
        if path.name == "latest.tmp":
            path.write_bytes(b"")
            raise OSError(28, "No space left on device", str(path))
        real(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_durably", full)
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, 2)
    assert files.published_steps(tmp_path) == [1]
    assert files.latest_step(tmp_path) == 1
    write(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]


def test_killed_between_publishing_and_latest_the_published_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    kill_before_latest_moves(tmp_path, 2, monkeypatch)
    assert files.named_step(tmp_path) == 1
    assert files.latest_step(tmp_path) == 2, "whoever only reads sees it, too"
    files.check_writable(tmp_path)
    assert (files.named_step(tmp_path), files.latest_step(tmp_path)) == (2, 2)
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]


@pytest.mark.parametrize("step", [1, 2])
def test_going_back_after_such_a_kill_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Also to the very checkpoint that ``latest`` named already."""
    for earlier in (1, 2):
        write(tmp_path, earlier)
    kill_before_latest_moves(tmp_path, 3, monkeypatch)
    later = (tmp_path / "latest.tmp").stat().st_mtime_ns + 1
    (tmp_path / "latest").write_text(f"step_0000000{step}\n")
    os.utime(tmp_path / "latest", ns=(later, later))
    assert files.latest_step(tmp_path) == step
    files.check_writable(tmp_path)
    assert files.latest_step(tmp_path) == step


def test_going_back_to_the_one_before_is_no_kill(tmp_path: Path) -> None:
    go_back(tmp_path)
    files.check_writable(tmp_path)
    assert files.latest_step(tmp_path) == 1


@pytest.mark.parametrize("source", ["step_00000002", "step_00000002.incomplete"])
def test_an_old_course_is_not_taken_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """``latest.tmp`` names the step before its folder is replaced."""
    go_back(tmp_path)
    with monkeypatch.context() as patch:
        at_rename(patch, source, Killed())
        patch.setattr(files, "_tidy", lambda root: None)
        with pytest.raises(Killed):
            write(tmp_path, 2, b"new course")
    assert (tmp_path / "latest.tmp").read_text() == "step_00000002\n"
    assert files.latest_step(tmp_path) == 1
    files.check_writable(tmp_path)
    assert files.latest_step(tmp_path) == 1
    assert (tmp_path / "step_00000002/data").read_bytes() == b"old course"


def test_what_is_published_counts_though_latest_cannot_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    with monkeypatch.context() as patch:
        at_rename(patch, "latest.tmp", PermissionError(13, "Permission denied"))
        assert write(tmp_path, 2) == tmp_path / "step_00000002"
    assert "latest still names an earlier checkpoint: Permission denied" in caplog.text
    assert files.latest_step(tmp_path) == 2


def test_stray_files_of_killed_processes_go(tmp_path: Path) -> None:
    strays = [".write_probe_abc", "latest.tmp"]
    for clean in (files.check_writable, lambda root: files.start_folder(root, 1)):
        for name in strays:
            (tmp_path / name).write_bytes(b"")
        clean(tmp_path)
        assert not [name for name in strays if (tmp_path / name).exists()]


def test_a_folder_called_latest_is_noticed_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(ConfigError, match=r"--save=.*latest is a folder, not a file; remove that folder"):
        files.check_writable(tmp_path)


def test_every_kind_of_damage_is_one_line_with_the_file(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    data, manifest = folder / "data", folder / files.MANIFEST_NAME
    text = manifest.read_bytes()

    def refused(path: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            files.verify_files(folder)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    data.write_bytes(b"weightS")
    assert "bytes differ" in refused(data)
    data.write_bytes(b"weight")
    assert "6 bytes instead of 7" in refused(data)
    data.unlink()
    assert "No such file" in refused(data)
    data.write_bytes(b"weights")
    for damaged in (b"", b"[]", b"{}", text[:-9], text.replace(b'"data"', b'"../x"'), b'{"files": {"data": 1}}'):
        manifest.write_bytes(damaged)
        refused(manifest)
    # A bit of a checksum flips: the manifest is at fault, not the file that it is about.
    for digit in range(text.index(b'"sha256"', text.index(b'"data"')) + 11, len(text) - 10):
        manifest.write_bytes(text[:digit] + bytes([text[digit] ^ 1]) + text[digit + 1 :])
        refused(manifest)
    manifest.write_bytes(text)
    files.verify_files(folder)


def test_ranks_share_the_files_to_verify(tmp_path: Path) -> None:
    folder = files.start_folder(tmp_path, 1)
    for name in "abcde":
        (folder / name).write_bytes(name.encode())
    files.write_manifest(folder, files.describe_files(folder / name for name in "abcde"))
    for name in "abcde":
        (folder / name).write_bytes(b"?")
        finders = [part for part in range(3) if _is_damaged(folder, part, 3)]
        assert len(finders) == 1
        (folder / name).write_bytes(name.encode())


def _is_damaged(folder: Path, part: int, num_parts: int) -> bool:
    try:
        files.verify_files(folder, part=part, num_parts=num_parts)
    except CheckpointError:
        return True
    return False


def test_check_writable(tmp_path: Path) -> None:
    files.check_writable(tmp_path / "new" / "folder")
    assert names(tmp_path / "new" / "folder") == []
    (tmp_path / "file").write_text("")
    for path, reason in ((tmp_path / "file", "a file is in the way"), (tmp_path / "file" / "below", "Not a directory")):
        with pytest.raises(ConfigError, match=f"cannot be written: {reason}"):
            files.check_writable(path)


@pytest.mark.parametrize("make", [files.check_writable, lambda root: files.start_folder(root, 1), files.make_folder])
def test_new_folders_are_durable(tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is on the disk when the folder it stands in was synced."""
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_folder", synced.append)
    make(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    synced.clear()
    files.make_folder(tmp_path / "a" / "b" / "c")
    assert synced == []


def test_check_writable_without_permission_or_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path, _data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_durably", full)
    with pytest.raises(ConfigError, match=r"--save=.*cannot be written: No space left on device"):
        files.check_writable(tmp_path)
    assert names(tmp_path) == []
    with pytest.raises(ConfigError, match="cannot be written"):
        files.check_writable(Path("/proc/checkpoints"))


def test_a_manifest_of_the_first_version_has_no_checksum_of_its_own(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    manifest = json.loads((folder / files.MANIFEST_NAME).read_bytes())
    del manifest["sha256"]
    files.write_durably(folder / files.MANIFEST_NAME, files.to_json(manifest))
    files.verify_files(folder)
    assert files.listed_sizes(folder) == {"data": 7}
