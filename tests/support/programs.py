"""Loads a stand-alone program of the repository as a module, so that its functions can be tested."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from types import ModuleType

from tests.support.commands import ROOT


@cache
def load_program(path: str) -> ModuleType:
    """Import a program by its path below the repository's root, without running its main."""
    name = "program_" + path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
