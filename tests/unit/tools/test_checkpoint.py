"""The tool as users call it: words, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("command", ["verify", "info", "reshard", "average"])
def test_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        tool.main([command, "--help"])
    assert caught.value.code == 0
    assert f"python tools/checkpoint.py {command}" in capsys.readouterr().out
