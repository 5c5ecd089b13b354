"""Lists of layouts are read, and what is wrong in one is named in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.proofs.layouts import Layout, read_layouts
from tests.support.commands import ROOT

GOOD = """
base: --num-layers 2
models: {dense: --hidden-size 8, moe: "--num-experts 4"}
layouts:
  - {name: a, world_size: 2, flags: --tensor-model-parallel-size 2}
  - {name: b, world_size: 1, models: [moe], optimisations: off, requires: deepspeed, quick: true}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "layouts.yaml"
    path.write_text(text)
    return path


def test_a_list_is_read(tmp_path: Path) -> None:
    layouts = read_layouts(write(tmp_path, GOOD))
    assert layouts.models == {
        "dense": ("--num-layers", "2", "--hidden-size", "8"),
        "moe": ("--num-layers", "2", "--num-experts", "4"),
    }
    assert layouts.layouts == (
        Layout("a", 2, ("--tensor-model-parallel-size", "2"), ("dense", "moe")),
        Layout("b", 1, (), ("moe",), "off", "deepspeed", ("moe",)),
    )


WRONG = {
    "no mapping": ("- 1", "the document"),
    "no YAML": ("layouts: [\n  a: b: c", "layouts.yaml:2"),
    "a tag": ("layouts: !!python/object/apply:os.system [ls]", "layouts.yaml:1"),
    "nothing": ("base: --x 1", "layouts"),
    "unknown key": ("layouts: [{name: a, world_size: 1, flag: x}]", "did you mean flags?"),
    "unknown key above": ("layout: []", "did you mean layouts?"),
    "no name": ("layouts: [{world_size: 1}]", "layouts[0].name"),
    "no size": ("layouts: [{name: a}]", "layouts[0].world_size"),
    "a truth as size": ("layouts: [{name: a, world_size: true}]", "layouts[0].world_size"),
    "size of zero": ("layouts: [{name: a, world_size: 0}]", "layouts[0].world_size"),
    "flags as list": ("layouts: [{name: a, world_size: 1, flags: [--a]}]", "layouts[0].flags"),
    "open quotation": ('layouts: [{name: a, world_size: 1, flags: "--a \'b"}]', "layouts[0].flags"),
    "unknown model": ("models: {m: --a}\nlayouts: [{name: a, world_size: 1, models: [n]}]", "layouts[0].models"),
    "unknown switch": ("layouts: [{name: a, world_size: 1, optimisations: some}]", "layouts[0].optimisations"),
    "quick": ("layouts: [{name: a, world_size: 1, quick: [b]}]", "layouts[0].quick"),
    "twice": ("layouts: [{name: a, world_size: 1}, {name: a, world_size: 2}]", "layouts[1].name"),
}


@pytest.mark.parametrize(("text", "named"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_named_in_one_line(text: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_layouts(write(tmp_path, text))
    assert named in str(error.value)
    assert "layouts.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_layouts(tmp_path / "nowhere.yaml")


def test_the_lists_of_this_repository_are_read() -> None:
    assert len(read_layouts(ROOT / "tools/parity_layouts.yaml").layouts) >= 24
    assert read_layouts(ROOT / "examples/layouts/small_moe.yaml").layouts
