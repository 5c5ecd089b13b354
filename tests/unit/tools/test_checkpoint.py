"""The tool as users call it: words, JSON and exit codes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_glue.training.checkpoint import files, rewrite
from megatron_glue.training.checkpoint.files import CheckpointError
from tests.support.programs import load_program
from tests.support.toy_run import Run

tool = load_program("tools/checkpoint.py")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run = Run(tmp_path / "run")
    for _ in range(2):
        run.train(1)
        run.save()
    return tmp_path / "run"


def json_of(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    assert tool.main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_verify(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["verify", str(root), "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"{root}/step_00000001", f"{root}/step_00000002"]
    assert "good. Step 2, " in lines[1]
    (found,) = json_of(capsys, "verify", root)["verified"]
    assert (found["step"], found["tensor_files"]) == (2, 1)
    shard = root / "step_00000002/__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert tool.main(["verify", str(root)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {shard}: damaged, ")
    assert tool.main(["verify", str(root), "--json"]) == 1
    assert "damaged" in json.loads(capsys.readouterr().out)["error"]
    assert tool.main(["verify", str(root / "nothing")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_info(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["info", str(root)]) == 0
    text = capsys.readouterr().out
    for part in ("step 2", "num_layers 2", "model.0.weight", "4 x 4", "float32", "optimizer: 12 tensors"):
        assert part in text
    assert json_of(capsys, "info", root / "step_00000001")["step"] == 1


def test_reshard_and_average(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["reshard", str(root), str(tmp_path / "two"), "--num-shards", "2"]) == 0
    assert "bit for bit, in 2 tensor files" in capsys.readouterr().out
    result = json_of(capsys, "average", root, "--last", 2, "--output", tmp_path / "mean")
    assert result["sources"] == [f"{root}/step_00000001", f"{root}/step_00000002"]
    assert result["all_but_weights_from"] == f"{root}/step_00000002"
    assert tool.main(["average", str(root), "--output", str(tmp_path / "more")]) == 0
    assert "moments, counters, the position in the data and random generators are those of" in capsys.readouterr().out
    assert tool.main(["reshard", str(root), str(tmp_path / "two")]) == 2
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tool.main(["reshard", str(root), str(tmp_path / "x"), "--num-shards", "0"])
    capsys.readouterr()


def test_verify_all_tells_of_each(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = root / "step_00000001/__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert tool.main(["verify", str(root), "--all"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{root}/step_00000001: damaged. {shard}: damaged, ")
    assert second.startswith(f"{root}/step_00000002: good. Step 2, ")
    assert tool.main(["verify", str(root), "--all", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [found["step"] for found in result["verified"]] == [2]
    assert [found["checkpoint"] for found in result["damaged"]] == [f"{root}/step_00000001"]


def test_an_average_of_more_than_there_are_is_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["average", str(root), "--last", "3", "--output", str(tmp_path / "mean")]
    assert tool.main(words) == 2
    assert capsys.readouterr().err == (f"error: --last=3: {root} holds 2 checkpoints; ask for no more than there are\n")
    assert not (tmp_path / "mean").exists()
    steps = [str(root / f"step_0000000{step}") for step in (1, 2)]
    assert tool.main(["average", *steps, "--last", "3", "--output", str(tmp_path / "mean")]) == 0


def test_one_is_told_as_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["info", str(root)]) == 0
    out = capsys.readouterr().out
    assert ", 1 rank: dp 1" in out
    assert "rng: 1 tensor, " in out


@pytest.mark.parametrize(
    ("sent", "code", "line"),
    [(signal.SIGINT, 130, "error: interrupted"), (signal.SIGTERM, 143, "error: terminated")],
)
@pytest.mark.parametrize("place", ["read_tensor", "write_parts", "finish_folder"])
def test_an_interrupted_tool_leaves_nothing_and_says_one_line(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sent: signal.Signals,
    code: int,
    line: str,
    place: str,
) -> None:
    real = getattr(rewrite, place)

    def interrupted(*arguments: object) -> object:
        assert (tmp_path / "copy.incomplete").is_dir()
        os.kill(os.getpid(), sent)
        return real(*arguments)

    monkeypatch.setattr(rewrite, place, interrupted)
    assert tool.main(["reshard", str(root), str(tmp_path / "copy")]) == code
    assert capsys.readouterr().err.splitlines() == [line]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def change_json(root: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change a file of the newest checkpoint, and every checksum with it."""
    folder = root / "step_00000002"
    content = json.loads((folder / name).read_bytes())
    change(content)
    rewrite_file(folder, name, json.dumps(content).encode())


def rewrite_file(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    files.write_manifest(folder, files.read_manifest(folder) | files.describe_files([folder / name]))


def one_slice(content: Any) -> dict[str, Any]:
    return content["tensors"]["model.0.weight"]["slices"][0]


MALFORMED: list[tuple[str, Callable[[Any], None]]] = [
    *[
        ("meta.json", lambda facts, key=key: facts.pop(key))
        for key in ("counters", "model", "data_position", "step", "config", "provenance", "num_skipped_updates")
    ],
    ("meta.json", lambda facts: facts.update(counters=[])),
    ("meta.json", lambda facts: facts.update(counters={"losses": ["low"]})),
    ("meta.json", lambda facts: facts.update(step="2")),
    ("meta.json", lambda facts: facts.update(step=2**70)),
    ("meta.json", lambda facts: facts["model"].update(num_experts="many")),
    ("meta.json", lambda facts: facts.update(data_position=7)),
    ("index.json", lambda index: one_slice(index).update(start=float("inf"))),
    ("index.json", lambda index: one_slice(index).update(bytes=2**80)),
    ("index.json", lambda index: one_slice(index).update(file="a\0b")),
    ("index.json", lambda index: one_slice(index).update(file="..")),
    ("index.json", lambda index: index.update(tensors=[])),
    ("index.json", lambda index: index["tensors"].update({"a\nb": index["tensors"].pop("model.0.weight")})),
]


def told_in_one_line(root: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["verify", str(root)], ["reshard", str(root), str(root.parent / "copy")]):
        assert tool.main(words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert str(file) in line
    run = Run(root, seed=5)
    with pytest.raises(CheckpointError) as caught:
        run.store.load(root / "step_00000002", run.state())
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "change"), MALFORMED, ids=[f"{n}-{i}" for i, (n, _) in enumerate(MALFORMED)])
def test_what_is_malformed_though_its_checksum_is_right_is_one_line(
    root: Path, name: str, change: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    change_json(root, name, change)
    told_in_one_line(root, root / "step_00000002" / name, capsys)


@pytest.mark.parametrize("name", ["meta.json", "index.json"])
def test_json_that_is_nested_deeply_is_one_line(root: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite_file(root / "step_00000002", name, b"[" * 100_000)
    told_in_one_line(root, root / "step_00000002" / name, capsys)


ENTRY = {"bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "entries",
    [{"a\0b": ENTRY}, {"..": ENTRY}, {"a/b": ENTRY}, {"\ud800": ENTRY}, {"a": 1}, {"a": {"bytes": 1}}]
    + [{"a": {"bytes": value, "sha256": ""}} for value in ("1", -1, 1.5, True, None)],
)
def test_a_malformed_manifest_is_one_line(
    root: Path, entries: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = root / "step_00000002"
    files.write_manifest(folder, files.read_manifest(folder) | entries)
    told_in_one_line(root, folder / "manifest.json", capsys)


def test_bytes_that_no_tensor_names_are_damage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_json(root, "index.json", lambda index: index["tensors"].clear())
    told_in_one_line(root, root / "step_00000002/__0_0.distcp", capsys)


@pytest.mark.parametrize("command", ["verify", "info", "reshard", "average"])
def test_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        tool.main([command, "--help"])
    assert caught.value.code == 0
    assert f"python tools/checkpoint.py {command}" in capsys.readouterr().out
