"""The rules that hold everywhere in this repository, and proof that each of them can fail."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from tests.support import house_rules
from tests.support.house_rules import (
    FLOORS,
    MAX_FILE_LINES,
    RULES,
    Rule,
    foreign_text,
    functions_are_short,
    host_reads,
    hot_path_reads_no_device_value,
)
from tests.support.source_tree import (
    ROOT,
    Source,
    functions,
    import_cycles,
    imported_modules,
    sources,
    sources_of_tests,
    texts,
)

ALLOWED_READS: dict[tuple[str, str], str] = {
    ("megatron_glue/ops/host_reader.py", "tolist"): "the one door: every read through it is counted",
    ("megatron_glue/ops/host_reader.py", "where"): "likewise",
    ("megatron_glue/ops/grouping.py", "tensor"): "the baseline that common stacks use, one mask per expert",
}
"""(file, read) -> why it may stand on the hot path."""

OPTIONAL_LIBRARIES = (
    "matplotlib",
    "hypothesis",
    "pytest",
    "deepspeed",
    "deep_ep",
    "transformer_engine",
    "transformer_engine_torch",
    "apex",
    "amp_C",
    "wandb",
    "tensorboard",
    "prometheus_client",
    "mpi4py",
)

KERNEL_FILES = tuple(f"megatron_glue/backends/triton/{name}.py" for name in ("grouping", "permute", "router", "trial"))
"""They import Triton, whose kernels are decorated functions, and are imported inside functions only."""

LONG_FUNCTION = "def f() -> None:\n    '''Doc.'''\n" + "    x = 1\n" * 80
DOC = '"""Doc."""\n'

BROKEN: list[tuple[Rule, str, str]] = [
    (house_rules.imports_go_down, "megatron_glue/ops/a.py", "from megatron_glue.layers.norm import Norm"),
    (house_rules.imports_go_down, "megatron_glue/ops/a.py", "from megatron_glue.config.sections import RunConfig"),
    (house_rules.imports_go_down, "megatron_glue/ops/a.py", "from megatron_glue import config"),
    (house_rules.imports_go_down, "megatron_glue/layers/a.py", "def f():\n    import megatron_glue.data.packing"),
    (house_rules.imports_go_down, "megatron_glue/layers/a.py", "from ..moe import router"),
    (house_rules.imports_go_down, "megatron_glue/layers/a.py", "import_module('megatron_glue.moe.router')"),
    (house_rules.imports_go_down, "megatron_glue/__init__.py", "import megatron_glue.types"),
    (house_rules.imports_go_down, "megatron_glue/training/a.py", "from tools import profile"),
    (house_rules.rooms_are_known, "megatron_glue/attic/a.py", ""),
    (house_rules.files_are_short, "megatron_glue/ops/a.py", "\n" * 401),
    (house_rules.files_are_short, "pretrain_x.py", "\n" * 46),
    (house_rules.functions_are_short, "megatron_glue/ops/a.py", LONG_FUNCTION),
    (house_rules.parameters_are_few, "megatron_glue/ops/a.py", "def f(a, b, c, d, e, *, g, h): ..."),
    (house_rules.parameters_are_few, "megatron_glue/layers/a.py", "def f(q: Tensor, b, c, d, e, f, g): ..."),
    (house_rules.parameters_are_few, "megatron_glue/ops/a.py", "def f(q: Tensor, b, c, d, e, f, g, h, i): ..."),
    (
        house_rules.parameters_are_few,
        "megatron_glue/layers/a.py",
        "class F(Function):\n    @staticmethod\n    def forward(ctx, a, b, c, d, e, f): ...",
    ),
    (house_rules.no_global, "megatron_glue/ops/a.py", "def f():\n    global x\n    x = 1"),
    (house_rules.names_say_something, "megatron_glue/ops/utils.py", ""),
    (house_rules.one_file_reads_the_environment, "megatron_glue/ops/a.py", "import os\nos.environ['A']"),
    (house_rules.one_file_reads_the_environment, "tools/a.py", "import os\nos.getenv('A')"),
    (house_rules.one_file_reads_the_environment, "tools/a.py", "from os import environ"),
    (house_rules.nothing_is_executed_from_data, "tools/a.py", "import pickle"),
    (house_rules.nothing_is_executed_from_data, "tools/a.py", "torch.load(f)"),
    (house_rules.nothing_is_executed_from_data, "tools/a.py", "torch.load(f, weights_only=False)"),
    (house_rules.nothing_is_executed_from_data, "tools/a.py", "yaml.load(f, Loader=x)"),
    (house_rules.nothing_is_executed_from_data, "tools/a.py", "subprocess.run(x, shell=True)"),
    (house_rules.nothing_is_executed_from_data, "tools/a.py", "np.load(f, allow_pickle=True)"),
    (house_rules.nothing_is_executed_from_data, "tools/a.py", "eval('1')"),
    (house_rules.nothing_is_executed_from_data, "tools/a.py", "dist.all_gather_object(a, b)"),
    (hot_path_reads_no_device_value, "megatron_glue/moe/a.py", "x.item()"),
    (hot_path_reads_no_device_value, "megatron_glue/moe/a.py", "x.sum().tolist()"),
    (hot_path_reads_no_device_value, "megatron_glue/moe/a.py", "torch.nonzero(x)"),
    (hot_path_reads_no_device_value, "megatron_glue/moe/a.py", "torch.bincount(x, minlength=3)"),
    (hot_path_reads_no_device_value, "megatron_glue/moe/a.py", "torch.where(x == 1)"),
    (hot_path_reads_no_device_value, "megatron_glue/moe/a.py", "x.repeat_interleave(n)"),
    (hot_path_reads_no_device_value, "megatron_glue/moe/a.py", "torch.tensor([1], device=d)"),
    (hot_path_reads_no_device_value, "megatron_glue/moe/a.py", "x[ids == 3]"),
    (hot_path_reads_no_device_value, "megatron_glue/moe/a.py", "x[~y]"),
    (hot_path_reads_no_device_value, "megatron_glue/moe/a.py", "x[pad_mask]"),
    (house_rules.modules_are_described, "tools/a.py", "x = 1"),
    (house_rules.modules_are_described, "tools/a.py", f"{DOC}def f() -> None: ..."),
    (house_rules.modules_are_described, "tools/a.py", f"{DOC}class A:\n    x = 1"),
    (house_rules.modules_are_described, "tools/a.py", f"{DOC}class A:\n    {DOC}    def f(self) -> None: ..."),
    (house_rules.signatures_are_typed, "tools/a.py", "def f(x) -> None: ..."),
    (house_rules.signatures_are_typed, "tools/a.py", "def f(x: int): ..."),
    (house_rules.signatures_are_typed, "tools/a.py", "class A:\n    def __init__(self, *x) -> None: ..."),
    (house_rules.errors_name_what_the_user_wrote, "megatron_glue/ops/a.py", "raise ConfigError('lr', 1, 'a', 'b')"),
    (house_rules.errors_name_what_the_user_wrote, "megatron_glue/ops/a.py", "ConfigError(field='world size', value=1)"),
    (house_rules.errors_name_what_the_user_wrote, "megatron_glue/ops/a.py", "ConfigError(f'field {x}', 1)"),
    (house_rules.errors_name_what_the_user_wrote, "megatron_glue/ops/a.py", "ConfigError('--a' if x else 'b', 1)"),
    (house_rules.nothing_is_left_for_later, "tools/a.py", "# TODO: later"),
    (house_rules.nothing_is_left_for_later, "tools/a.py", "raise NotImplementedError"),
]

SOUND: list[tuple[Rule, str, str]] = [
    (house_rules.imports_go_down, "megatron_glue/layers/a.py", "from megatron_glue.ops import rope\nimport torch"),
    (house_rules.imports_go_down, "megatron_glue/layers/a.py", "from megatron_glue.layers import norm"),
    (house_rules.imports_go_down, "tools/a.py", "from megatron_glue.training import app"),
    (house_rules.functions_are_short, "tools/a.py", "def f() -> None:\n" + "    x = 1\n" * 79),
    (house_rules.parameters_are_few, "tools/a.py", "class A:\n    def f(self, a, b, c, d, e, f): ..."),
    (
        house_rules.parameters_are_few,
        "megatron_glue/ops/a.py",
        "class F(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, a, b, c, d, e, f): ...",
    ),
    (house_rules.parameters_are_few, "megatron_glue/backends/a.py", "def f(q: Tensor, b, c, d, e, f, g): ..."),
    (house_rules.parameters_are_few, "megatron_glue/backends/a.py", "@triton.jit\ndef k(a, b, c, d, e, f, g): ..."),
    (
        house_rules.parameters_are_few,
        "megatron_glue/backends/a.py",
        "@triton.jit(do_not_specialize=['a'])\ndef k(a, b, c, d, e, f, g): ...",
    ),
    (house_rules.one_file_reads_the_environment, "megatron_glue/config/environment.py", "import os\nos.environ"),
    (house_rules.nothing_is_executed_from_data, "tools/a.py", "torch.load(f, weights_only=True)\nyaml.safe_load(x)"),
    (hot_path_reads_no_device_value, "megatron_glue/data/a.py", "x.item()"),
    (hot_path_reads_no_device_value, "megatron_glue/moe/a.py", "np.bincount(x)\nx[ids]\nx[1:n]"),
    (hot_path_reads_no_device_value, "megatron_glue/moe/a.py", "x.repeat_interleave(n, output_size=3)"),
    (
        house_rules.errors_name_what_the_user_wrote,
        "tools/a.py",
        "ConfigError('--lr', 1)\nConfigError(flag_of('lr'), 1)\nConfigError('WORLD_SIZE', 1)\n"
        "ConfigError(f'{path}:{line}', 1)\nConfigError(f'--{name}', 1)\nConfigError(field, 1)",
    ),
    (house_rules.modules_are_described, "tools/a.py", f"{DOC}def _f(): ...\nclass _A:\n    def f(self): ..."),
]


def test_every_rule_can_fail() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(RULES)


@pytest.mark.parametrize(("rule", "path", "text"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_rule_finds_what_breaks_it(rule: Rule, path: str, text: str) -> None:
    assert rule(Source.parse(path, text)), text


@pytest.mark.parametrize(("rule", "path", "text"), SOUND, ids=lambda value: getattr(value, "__name__", None))
def test_rule_lets_sound_code_pass(rule: Rule, path: str, text: str) -> None:
    assert rule(Source.parse(path, text)) == []


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule is not hot_path_reads_no_device_value])
def test_house_rule(rule: Rule) -> None:
    found = [line for source in sources() for line in rule(source)]
    assert not found, f"{rule.__doc__}\n" + "\n".join(found)


def test_hot_path_reads_are_allowed_by_name_and_reason() -> None:
    found = [
        source.at(node, what)
        for source in sources()
        if source.room in house_rules.HOT_ROOMS
        for node, what in host_reads(source)
        if (source.path, what) not in ALLOWED_READS
    ]
    assert not found, "these wait for the device; read through HostReader:\n" + "\n".join(found)


def test_allowances_are_used() -> None:
    used = {(source.path, what) for source in sources() for _, what in host_reads(source)}
    assert set(ALLOWED_READS) <= used, "remove allowances that nothing needs"


def test_imports_have_no_cycle() -> None:
    assert import_cycles(sources()) == []


def test_cycles_are_found_inside_functions_too() -> None:
    first = Source.parse("megatron_glue/ops/a.py", "from megatron_glue.ops.b import x")
    second = Source.parse("megatron_glue/ops/b.py", "def f():\n    from megatron_glue.ops import a")
    assert import_cycles([first, second]) == [["megatron_glue.ops.a", "megatron_glue.ops.b", "megatron_glue.ops.a"]]
    assert import_cycles([first]) == []


def test_every_room_exists() -> None:
    assert {path.parent.name for path in ROOT.glob("megatron_glue/*/__init__.py")} == set(FLOORS)


def test_tests_are_short_too() -> None:
    found = [
        f"{source.path}: {len(source.text.splitlines())} lines"
        for source in sources_of_tests()
        if len(source.text.splitlines()) > MAX_FILE_LINES
    ]
    found += [line for source in sources_of_tests() for line in functions_are_short(source)]
    assert not found, "\n".join(found)


def test_no_text_belongs_to_one_machine() -> None:
    found = [line for path, text in texts() for line in foreign_text(path, text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["see {}root/x", "({}home/me/x", "a\n{mark} x\n"])
def test_foreign_text_is_found(text: str) -> None:
    assert foreign_text("a.md", text.format("/", mark="<" * 7))
    assert foreign_text("a.md", "see docs/root/x and my/home/me/y") == []


def test_scripts_hold_no_logic() -> None:
    found = [
        f"{script.name}: {word}"
        for script in ROOT.glob("scripts/**/*.sh")
        for word in ("python -c", "python3 -c", "<<", "awk ", "sed ")
        if word in script.read_text(encoding="utf-8")
    ]
    assert not found, "launchers only:\n" + "\n".join(found)


def _modules_after(code: str) -> set[str]:
    """Run code in a new interpreter and return the top-level modules it loaded."""
    command = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    run = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_the_front_door_loads_nothing() -> None:
    assert not _modules_after("import megatron_glue") & {"torch", "numpy", "pydantic", "yaml", "rich"}


def test_no_module_loads_an_optional_library() -> None:
    modules = [
        source.module
        for source in sources()
        if source.path.startswith("megatron_glue/") and source.path not in KERNEL_FILES
    ]
    loaded = _modules_after("\n".join(f"import {module}" for module in modules))
    baseline = _modules_after("import torch, numpy, pydantic, yaml, rich")
    assert not (loaded - baseline) & set(OPTIONAL_LIBRARIES)


OWN_FILES = {
    "transformer_engine": "megatron_glue/backends/transformer_engine.py",
    "transformer_engine_torch": "megatron_glue/backends/transformer_engine.py",
    "apex": "megatron_glue/backends/apex.py",
    "amp_C": "megatron_glue/backends/apex.py",
    "fused_layer_norm_cuda": "megatron_glue/backends/apex.py",
    "deep_ep": "megatron_glue/backends/deepep.py",
    "wandb": "megatron_glue/training/telemetry/sinks/weights_and_biases.py",
    "torch.utils.tensorboard": "megatron_glue/training/telemetry/sinks/tensorboard.py",
}
"""The one file that may name an optional library in an import."""


def _foreign_imports(source: Source) -> list[str]:
    """Imports of a library outside its own file, also inside functions."""
    return [
        source.at(node, f"imports {name}")
        for node, name in imported_modules(source)
        for library, path in OWN_FILES.items()
        if f"{name}.".startswith(f"{library}.") and path != source.path
    ]


def test_a_library_of_kernels_is_imported_in_its_own_file_only() -> None:
    found = [line for source in sources() for line in _foreign_imports(source)]
    assert not found, "\n".join(found)


def test_a_foreign_import_is_found() -> None:
    for text in (
        "import apex.optimizers",
        "def f(): importlib.import_module('transformer_engine.pytorch')",
        "def f(): importlib.import_module('wandb')",
        "def f():\n    from torch.utils.tensorboard import SummaryWriter",
    ):
        assert _foreign_imports(Source.parse("megatron_glue/training/a.py", text))
    assert not _foreign_imports(Source.parse("megatron_glue/backends/apex.py", "import apex.optimizers"))


def _loads_triton(source: Source) -> list[str]:
    """Imports of Triton, or of a file with its kernels, that run when the file itself is imported."""
    kernel_modules = {path.removesuffix(".py").replace("/", ".") for path in KERNEL_FILES}
    inside = {node for function, _ in functions(source) for node in ast.walk(function)}
    return [
        source.at(node, f"imports {name}")
        for node, name in imported_modules(source)
        if node not in inside and (name.split(".")[0] == "triton" or name in kernel_modules)
    ]


def test_only_kernel_files_load_triton() -> None:
    """By their text: torch loads Triton itself behind some of its modules, so loaded modules prove nothing."""
    found = [line for source in sources() if source.path not in KERNEL_FILES for line in _loads_triton(source)]
    assert not found, "\n".join(found)


def test_loading_triton_is_found() -> None:
    for text in (
        "import triton",
        "import triton.language as tl",
        "from megatron_glue.backends.triton.router import route",
    ):
        assert _loads_triton(Source.parse("megatron_glue/moe/a.py", text))
        assert not _loads_triton(Source.parse("megatron_glue/moe/a.py", f"def f():\n    {text}"))
