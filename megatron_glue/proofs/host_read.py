"""What a host read of a device value is, and where in the source and in the model it happened. Found from the stack.

The place is the innermost line that belongs neither to torch nor to another library nor to the watch itself. A read
that goes through ``HostReader`` is attributed to who asked for it.

The layer is that of the innermost module in the stack. Backward has no module in its stack; there the running
autograd node tells, by its sequence number, during which layer's forward it was made.
"""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from megatron_glue.activation.recompute import _BlockCall
from megatron_glue.ops import host_reader
from megatron_glue.parallel.managed_block import ManagedBlock, canonical_name

# Like all names of files in a stack: as the import found them, through symbolic links or not.
PACKAGE = Path(__file__).parents[1]
_READER_FILE = host_reader.__file__
_WATCH_FILES = frozenset(
    str(PACKAGE / "proofs" / f"{name}.py") for name in ("cuda_sync_watch", "host_read", "sync_watch", "tensor_methods")
)
_LIBRARY_PATHS = [
    Path(torch.__file__).parent,
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
]
_LIBRARIES = tuple({f"{form}/" for path in _LIBRARY_PATHS for form in (path, path.resolve())})
_COMPREHENSION = re.compile(r"(\.<locals>\.<(listcomp|setcomp|dictcomp|genexpr)>)+$")
_RECOMPUTE = _BlockCall._run_again.__code__


@dataclass(frozen=True, order=True)
class HostRead:
    """One kind of read at one place. Counted by who collects them.

    Attributes:
        file: Path from the repository on, or whole for a file outside of it.
        line: Line number.
        function: Qualified name of the function.
        kind: ``item``, ``tolist``, ``boolean index``, ``upload``, ...; on CUDA always ``synchronisation``.
        phase: ``forward``, ``recompute``, ``backward``, or the function of the step that it happened in.
        layer: Global index of the layer; -1 outside of all layers.
        module: Name of the module whose code ran; empty if none did.
        announced: Whether it went through ``HostReader``, which counts it in every run.
        source: Text of the line.
    """

    file: str
    line: int
    function: str
    kind: str
    phase: str
    layer: int = -1
    module: str = ""
    announced: bool = False
    source: str = ""

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class LayerMap:
    """Names modules, and tells which layer an autograd node belongs to. Its hooks live as long as it is entered.

    Args:
        model: The model, under an engine or not.
        on_input: Called with the positional arguments of every block, in forward and in recompute.
    """

    def __init__(self, model: nn.Module, on_input: Any = None) -> None:
        self._model = model
        self._on_input = on_input
        self._names = {id(module): _module_name(name) for name, module in model.named_modules()}
        self._starts: list[int] = []
        self._ends: list[tuple[int, int]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> LayerMap:
        for module in self._model.modules():
            if isinstance(module, ManagedBlock):
                self._handles += [
                    module.register_forward_pre_hook(self._begin),
                    module.register_forward_hook(self._end),
                ]
                if self._on_input is not None:
                    self._handles.append(module.managed.register_forward_pre_hook(self._show_input))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def name_of(self, module: object) -> str:
        """Name of a module of the model without what wrappers add; empty for anything else."""
        return self._names.get(id(module), "")

    def layer_of_node(self, node: Any) -> int:
        """Layer in whose forward an autograd node was made; -1 if in none.

        Args:
            node: As ``torch._C._current_autograd_node`` returns it.
        """
        number = node._sequence_nr()
        index = bisect_right(self._starts, number) - 1
        if index < 0 or index >= len(self._ends):
            return -1
        end, layer = self._ends[index]
        return layer if number < end else -1

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._starts.append(_next_sequence_number())

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._ends.append((_next_sequence_number(), layer_of(self.name_of(module))))

    def _show_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._on_input(args)


def _next_sequence_number() -> int:
    """Of the next autograd node that this thread makes."""
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]


def _module_name(name: str) -> str:
    """``canonical_name`` is for parameters and may leave nothing of a wrapper's own name."""
    return canonical_name(f"{name}.weight").removesuffix("weight").rstrip(".")


def layer_of(module_name: str) -> int:
    """Global layer index in a module's name, ``blocks.3.ffn`` -> 3; -1 if there is none."""
    words = module_name.split(".")
    return int(words[1]) if words[0] == "blocks" and len(words) > 1 and words[1].isdigit() else -1


def locate(kind: str, layers: LayerMap, stations: frozenset[CodeType]) -> HostRead:
    """Describe the read that is happening now.

    Args:
        kind: What it is.
        layers: Of the model that runs.
        stations: Functions that make up a step: what they call names a phase that is no pass through the model.

    Returns:
        The read, at its innermost line of the project's or the user's own code.
    """
    found: FrameType | None = None
    module, station, is_recompute, announced = "", "", False, False
    for frame in _frames():
        code = frame.f_code
        if found is None:
            announced = announced or code.co_filename == _READER_FILE
            found = frame if _is_own(code.co_filename) else None
        is_recompute = is_recompute or code is _RECOMPUTE
        module = module or layers.name_of(frame.f_locals.get("self"))
        if not station and frame.f_back is not None and frame.f_back.f_code in stations and code not in stations:
            station = code.co_qualname
    node = torch._C._current_autograd_node()
    layer = layer_of(module)
    if layer < 0 and node is not None:
        layer = layers.layer_of_node(node)
    phase = "recompute" if is_recompute else "backward" if node is not None else "forward" if module else station
    file, line, function = ("", 0, "") if found is None else _position(found)
    return HostRead(
        file=_shown(file),
        line=line,
        function=function,
        kind=kind,
        phase=phase or "outside of the step",
        layer=layer,
        module=module,
        announced=announced,
        source=linecache.getline(file, line).strip(),
    )


def _frames() -> Iterator[FrameType]:
    """The stack from here outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _position(frame: FrameType) -> tuple[str, int, str]:
    """File, line and function; before Python 3.12 a comprehension is a function of its own, and is not shown as one."""
    return frame.f_code.co_filename, frame.f_lineno, _COMPREHENSION.sub("", frame.f_code.co_qualname)


def _is_own(file: str) -> bool:
    """Whether a file is the project's or the user's, and neither a library nor part of the watch."""
    if file in _WATCH_FILES or file == _READER_FILE or file.startswith("<"):
        return False
    return file.startswith(f"{PACKAGE}/") or not file.startswith(_LIBRARIES)


def _shown(file: str) -> str:
    root = f"{PACKAGE.parent}/"
    return file.removeprefix(root)
