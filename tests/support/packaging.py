"""What setup.py and the Dockerfile say, as data."""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass

from tests.support.source_tree import ROOT

DOCKERFILE = ROOT / "scripts/docker/Dockerfile"


@dataclass(frozen=True)
class Step:
    """One instruction of a Dockerfile."""

    stage: str
    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """Its words, without options such as ``--from``."""
        return [word for word in shlex.split(self.text) if not word.startswith("--")]


def dockerfile_steps(text: str) -> list[Step]:
    """Instructions in order, lines that go on joined; those before the first stage have an empty one."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    steps, stage = [], ""
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stage = rest.split(" AS ")[1]
        steps.append(Step(stage, name, rest))
    return steps


def setup_requirements() -> tuple[list[str], dict[str, list[str]]]:
    """``install_requires`` and the extras of setup.py, read without running it."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    required: list[str] = []
    extras: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id="EXTRAS")], value=ast.Dict() as value):
                extras |= ast.literal_eval(value)
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id="EXTRAS"), slice=ast.Constant(value=str(name)))]):
                extras[name] = ast.literal_eval(node.value) if isinstance(node.value, ast.List) else []
            case ast.keyword(arg="install_requires", value=value):
                required = ast.literal_eval(value)
    return required, extras
