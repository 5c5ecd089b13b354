"""Records are written whole or not at all, keep each other's place, and are read only if they are whole."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.proofs import baselines
from megatron_glue.proofs.baselines import list_records, read_record, record_name, write_record
from tests.support.baseline_records import RECORD


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "new/archive", RECORD, may_replace=False)
    assert folder == tmp_path / "new/archive/0.1.0-abc"
    assert names(folder) == ["config.yaml", "environment.json", "losses.csv", "packages.txt", "record.json"]
    read = read_record(folder, "compare")
    assert read == dataclasses.replace(RECORD, observed={"name": RECORD.name, **RECORD.observed})
    assert (folder / "losses.csv").read_text().splitlines()[2] == f"2,{1 / 3!r},0.5"
    assert "megatron_glue 0.1.0-abc on Python 3.12.1" in (folder / "packages.txt").read_text()
    assert names(folder.parent) == [RECORD.name], "nothing is left aside"


def test_a_record_is_replaced_only_if_asked_for(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD, may_replace=False)
    newer = dataclasses.replace(RECORD, config_yaml="data: {}\n")
    with pytest.raises(ConfigError, match="is there already"):
        write_record(tmp_path, newer, may_replace=False)
    write_record(tmp_path, newer, may_replace=True)
    assert read_record(tmp_path / RECORD.name, "compare").config_yaml == newer.config_yaml
    assert names(tmp_path) == [RECORD.name]


@pytest.mark.parametrize("broken", ["write_text", "rename"])
def test_a_failure_leaves_the_earlier_record(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_record(tmp_path, RECORD, may_replace=False)
    rename = Path.replace

    def fail(*_: Any) -> None:
        raise OSError("disk is full")

    def fail_at_the_last(self: Path, target: Path) -> Path:
        if self.suffix == ".tmp" and target == folder:
            fail()
        return rename(self, target)

    if broken == "rename":
        monkeypatch.setattr(Path, "replace", fail_at_the_last)
    else:
        monkeypatch.setattr(baselines, "write_text", fail)
    with pytest.raises(OSError, match="disk is full"):
        write_record(tmp_path, dataclasses.replace(RECORD, config_yaml="other"), may_replace=True)
    assert read_record(folder, "compare").config_yaml == RECORD.config_yaml
    assert names(tmp_path) == [RECORD.name]


def test_a_record_is_named_after_the_code() -> None:
    software = {"megatron_glue": "0.1.0", "git revision": "3f2a9c1d7e55", "source": "0123456789ab"}
    assert record_name(software) == "0.1.0-3f2a9c1d7e55"
    assert record_name({**software, "git revision": "3f2a+changes"}) == "0.1.0-3f2a+changes-0123456789ab"
    assert record_name({**software, "git revision": "none"}) == "0.1.0-source-0123456789ab"
    assert record_name(software, "torch-2.13+cpu") == "0.1.0-3f2a9c1d7e55-torch-2.13+cpu"
    with pytest.raises(ConfigError, match="--label=a/b: is no part of a folder's name"):
        record_name(software, "a/b")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("record.json", None, "cannot be read"),
        ("record.json", "{", "cannot be read"),
        ("record.json", "{}", "is no baseline"),
        ("packages.txt", None, "is not whole"),
        ("environment.json", "[", "is not whole"),
        ("config.yaml", None, "is not whole"),
    ],
)
def test_what_is_not_whole_is_refused(name: str, content: str | None, reason: str, tmp_path: Path) -> None:
    folder = write_record(tmp_path, RECORD, may_replace=False)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=reason):
        read_record(folder, "compare")


def test_an_archive_in_place_of_a_record_names_its_records(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD, may_replace=False)
    with pytest.raises(ConfigError, match=r"is an archive of records; name one of them: 0\.1\.0-abc"):
        read_record(tmp_path, "--against")


def test_records_are_listed_by_their_time(tmp_path: Path) -> None:
    for name, started in (("0.1.0-b", "2026-01-01"), ("0.1.0-a", "2026-01-03"), ("0.2.0-c", "2026-01-02")):
        environment = {**RECORD.environment, "started": started}
        made = dataclasses.replace(RECORD, name=name, environment=environment)
        write_record(tmp_path, made, may_replace=False)
    (tmp_path / ".0.3.0-d.77.tmp").mkdir()
    (tmp_path / ".0.3.0-d.77.tmp/record.json").write_text("{}")
    (tmp_path / "0.2.0-c/config.yaml").unlink()
    records, damaged = list_records(tmp_path)
    assert [record.name for record in records] == ["0.1.0-b", "0.1.0-a"]
    assert len(damaged) == 1
    assert json.dumps(damaged).count("0.2.0-c") >= 1
