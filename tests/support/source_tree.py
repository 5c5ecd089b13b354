"""The project's own source as data: files, syntax trees and who imports whom."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_glue"
SKIPPED_FOLDERS = {"__pycache__", "runs", "build", "dist", "node_modules", "shared"}
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".cfg", ".txt", ".sh", ""}


@dataclass(frozen=True)
class Source:
    """One Python file.

    Attributes:
        path: Path below the repository root, with slashes.
        text: Its text.
        tree: Its syntax tree.
    """

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> Source:
        """Parse a text as if it stood at ``path``."""
        return cls(path, text, ast.parse(text))

    @property
    def module(self) -> str:
        """Dotted module name."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> str:
        """Dotted name of the package that relative imports start from."""
        return self.module if self.path.endswith("/__init__.py") else self.module.rpartition(".")[0]

    @property
    def room(self) -> str:
        """Name of the package below megatron_glue, or empty."""
        parts = self.module.split(".")
        return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else ""

    def at(self, node: ast.AST, message: str) -> str:
        """Return a message with the place of a node."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {message}"


@functools.cache
def sources(root: Path = ROOT) -> list[Source]:
    """Return the package, the tools and the entry points."""
    files = [*root.glob(f"{PACKAGE}/**/*.py"), *root.glob("tools/**/*.py"), *root.glob("pretrain_*.py")]
    return [Source.parse(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")) for file in sorted(files)]


def sources_of_tests(root: Path = ROOT) -> list[Source]:
    """Return the tests and what supports them."""
    files = sorted(root.glob("tests/**/*.py"))
    return [Source.parse(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def texts(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield path and text of every text file of the repository that is not a build product."""
    for file in sorted(root.rglob("*")):
        parts = file.relative_to(root).parts
        hidden = [part for part in parts[:-1] if part.startswith(".") and part != ".ci"]
        built = [part for part in parts if part in SKIPPED_FOLDERS or part.endswith(".egg-info")]
        if hidden or built or file.suffix not in TEXT_SUFFIXES or not file.is_file():
            continue
        try:
            yield "/".join(parts), file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def imported_modules(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Yield every module that a file names in an import, wherever the import stands, also as ``import_module("x")``.

    ``from a import b`` yields ``a`` and ``a.b``: ``b`` may be a module.
    """
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names=names):
                yield from ((node, name.name) for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = module or ""
                if level:
                    parent = source.package.split(".")
                    base = ".".join([*parent[: len(parent) - level + 1], *([module] if module else [])])
                yield node, base
                yield from ((node, f"{base}.{name.name}") for name in names)
            case ast.Call(func=function, args=[ast.Constant(value=str() as name), *_]):
                if getattr(function, "attr", getattr(function, "id", "")) in ("import_module", "__import__"):
                    yield node, name


def import_cycles(files: Iterable[Source]) -> list[list[str]]:
    """Return the import cycles among files, each as the modules on it."""
    by_module = {source.module: source for source in files}
    graph: dict[str, list[str]] = {}
    for module, source in by_module.items():
        named = {name for _, name in imported_modules(source) if name in by_module and name != module}
        # `from package import submodule` names the package too, but does not need what its __init__ offers.
        covered = {name.rpartition(".")[0] for name in named}
        graph[module] = sorted(name for name in named if name not in covered or name not in _parents(module))
    cycles: list[list[str]] = []
    finished: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            cycles.append([*trail[trail.index(module) :], module])
            return
        if module in finished:
            return
        for imported in graph[module]:
            visit(imported, [*trail, module])
        finished.add(module)

    for module in graph:
        visit(module, [])
    return cycles


def _parents(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[:depth]) for depth in range(1, len(parts))}


def functions(source: Source) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, list[ast.ClassDef]]]:
    """Yield every function with the classes around it, functions inside functions included."""

    def walk(node: ast.AST, classes: list[ast.ClassDef]) -> Iterator[tuple[ast.FunctionDef, list[ast.ClassDef]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child, classes  # pyright: ignore[reportReturnType]
                yield from walk(child, [])
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, [*classes, child])
            else:
                yield from walk(child, classes)

    yield from walk(source.tree, [])


def is_autograd_function(class_definition: ast.ClassDef) -> bool:
    """Whether a class is a ``torch.autograd.Function``."""
    return any(ast.unparse(base).split(".")[-1] == "Function" for base in class_definition.bases)


def dotted_name(node: ast.AST) -> str:
    """Return ``a.b.c`` for such an expression, ``?.c`` when something else stands in front."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return "?"
