"""An environment becomes a requirements file that pip can read, without anything secret, and two are compared."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from megatron_glue.proofs.packages import changed_packages, installed_packages, read_requirements, to_requirements


def installed(folder: Path, name: str, version: str, origin: object = None) -> None:
    """Write the metadata of an installed package."""
    place = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if origin is not None:
        (place / "direct_url.json").write_text(origin if isinstance(origin, str) else json.dumps(origin))


def packages_in(*folders: Path) -> dict[str, str]:
    return installed_packages(metadata.distributions(path=[str(folder) for folder in folders]))


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        (None, "Some.Name==1.0+cpu"),
        ("not JSON", "Some.Name==1.0+cpu"),
        ({"url": "file:///src", "dir_info": {}}, "Some.Name==1.0+cpu"),
        ({"url": "file:///src", "dir_info": {"editable": True}}, "# Some.Name 1.0+cpu, installed in place"),
        (
            {"url": "https://user:secret@host:8/x.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "Some.Name @ git+https://host:8/x.git@ab12",
        ),
        ({"url": "https://token@host/x.whl", "archive_info": {}}, "Some.Name @ https://host/x.whl"),
    ],
)
def test_a_line_says_where_a_package_came_from(origin: object, line: str, tmp_path: Path) -> None:
    installed(tmp_path, "Some.Name", "1.0+cpu", origin)
    assert packages_in(tmp_path) == {"some-name": line}


def test_the_first_on_the_path_counts_and_this_project_is_left_to_the_record(tmp_path: Path) -> None:
    installed(tmp_path / "a", "torch", "2.12")
    installed(tmp_path / "b", "torch", "2.13")
    installed(tmp_path / "b", "megatron-glue", "0.1")
    assert packages_in(tmp_path / "a", tmp_path / "b") == {"torch": "torch==2.12"}


def test_what_is_written_is_read_back_whole() -> None:
    packages = installed_packages()
    assert packages["torch"].startswith("torch==")
    assert list(packages) == sorted(packages)
    text = to_requirements(packages, "megatron_glue 0.1")
    assert text.startswith("# megatron_glue 0.1\n")
    assert read_requirements(text) == packages


def test_changes_are_named() -> None:
    then = {"a": "a==1", "b": "B @ https://host/b.whl", "c": "c==1", "e": "# e 1, installed in place"}
    now = {"a": "a==1", "b": "B==2", "d": "d==1", "e": "# e 2, installed in place"}
    assert changed_packages(then, now) == [
        "b https://host/b.whl -> 2",
        "c 1 -> absent",
        "d absent -> 1",
        "e 1 (in place) -> 2 (in place)",
    ]
