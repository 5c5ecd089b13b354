"""The house rules as functions: each takes one source file and returns what breaks the rule, with its place.

They work on the syntax tree, so a rule that needs types (a device value as a condition) is out of their reach.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from tests.support.source_tree import (
    PACKAGE,
    Source,
    dotted_name,
    functions,
    imported_modules,
    is_autograd_function,
)

FLOORS = {
    "types": 0,
    "ops": 1,
    "config": 1,
    "parallel": 2,
    "backends": 3,
    "layers": 4,
    "activation": 4,
    "data": 4,
    "moe": 5,
    "models": 6,
    "training": 7,
    "proofs": 8,
}
HOT_ROOMS = ("ops", "backends", "layers", "moe", "activation", "models")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 6
MAX_KERNEL_PARAMETERS = 8
MAX_ENTRY_POINT_LINES = 45
FORBIDDEN_STEMS = {"utils", "util", "helpers", "helper", "common", "misc"}
PICKLING_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
PICKLING_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
HOST_READS = {
    "item",
    "tolist",
    "nonzero",
    "argwhere",
    "cpu",
    "bincount",
    "unique",
    "unique_consecutive",
    "masked_select",
}
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:work|root|mnt|home/\w+|Users/\w+)/\w")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK|NotImplementedError)\b")
CONFLICT = re.compile(r"^(?:<<<<<<<|>>>>>>>) ", re.MULTILINE)

Rule = Callable[[Source], list[str]]


def imports_go_down(source: Source) -> list[str]:
    """A room imports itself and rooms on lower floors; nothing in the package imports what stands outside it."""
    found = []
    if not source.module.startswith(PACKAGE):
        return found
    for node, name in imported_modules(source):
        parts = name.split(".")
        if parts[0] in ("tools", "tests", "pretrain_gpt", "pretrain_moe"):
            found.append(source.at(node, f"the package imports {name}"))
        if parts[0] != PACKAGE or len(parts) < 2 or parts[1] not in FLOORS or parts[1] == source.room:
            continue
        if source.room not in FLOORS or FLOORS[parts[1]] >= FLOORS[source.room]:
            found.append(source.at(node, f"{source.room or 'the front door'} imports {name}, which is not below it"))
    return sorted(set(found))


def rooms_are_known(source: Source) -> list[str]:
    """Every package has its floor."""
    is_stray = source.path.startswith(PACKAGE) and source.room not in FLOORS and source.module != PACKAGE
    return [source.at(source.tree, f"{source.room} has no floor")] if is_stray else []


def files_are_short(source: Source) -> list[str]:
    """A file has at most 400 lines, an entry point 45."""
    count = len(source.text.splitlines())
    limit = MAX_ENTRY_POINT_LINES if source.path.startswith("pretrain_") else MAX_FILE_LINES
    return [source.at(source.tree, f"{count} lines, the limit is {limit}")] if count > limit else []


def functions_are_short(source: Source) -> list[str]:
    """A function has at most 80 lines."""
    found = []
    for function, _ in functions(source):
        count = (function.end_lineno or function.lineno) - function.lineno + 1
        if count > MAX_FUNCTION_LINES:
            found.append(source.at(function, f"{function.name} has {count} lines, the limit is {MAX_FUNCTION_LINES}"))
    return found


def parameters_are_few(source: Source) -> list[str]:
    """A function has at most 6 parameters.

    In ops and backends, kernels (functions whose first parameter is a tensor) have at most 8; methods of autograd
    Functions and compiled kernels, whose signature is not ours to choose, have any number.
    """
    found = []
    for function, classes in functions(source):
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        arguments = [argument for argument in arguments if argument.arg not in ("self", "cls")]
        limit = MAX_PARAMETERS
        if source.room in ("ops", "backends") and arguments:
            is_compiled = any(
                dotted_name(decorator.func if isinstance(decorator, ast.Call) else decorator).endswith("jit")
                for decorator in function.decorator_list
            )
            if is_compiled or any(map(is_autograd_function, classes)):
                continue
            annotation = arguments[0].annotation
            if annotation is not None and dotted_name(annotation).endswith("Tensor"):
                limit = MAX_KERNEL_PARAMETERS
        if len(arguments) > limit:
            found.append(source.at(function, f"{function.name} has {len(arguments)} parameters, the limit is {limit}"))
    return found


def no_global(source: Source) -> list[str]:
    """No function rebinds a module's name."""
    return [source.at(node, "global statement") for node in ast.walk(source.tree) if isinstance(node, ast.Global)]


def names_say_something(source: Source) -> list[str]:
    """No drawer for everything."""
    stem = source.path.split("/")[-1].removesuffix(".py")
    return [source.at(source.tree, f"{stem}.py says nothing about its content")] if stem in FORBIDDEN_STEMS else []


def one_file_reads_the_environment(source: Source) -> list[str]:
    """Only config/environment.py reads the process environment."""
    if source.path == f"{PACKAGE}/config/environment.py":
        return []
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = []
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in names:
                found.append(source.at(node, f"os.{name}"))
            case ast.ImportFrom(module="os", names=imported) if names & {alias.name for alias in imported}:
                found.append(source.at(node, "import from os of the environment"))
    return found


def nothing_is_executed_from_data(source: Source) -> list[str]:
    """Nothing is unpickled, evaluated or handed to a shell."""
    found = []
    for node, name in imported_modules(source):
        if name.split(".")[0] in PICKLING_MODULES:
            found.append(source.at(node, f"import of {name}"))
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted_name(node.func)
        last = name.split(".")[-1]
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if (
            name in ("eval", "exec", "compile", "os.system", "os.popen", "tempfile.mktemp")
            or last in PICKLING_COLLECTIVES
        ):
            found.append(source.at(node, name))
        if name == "torch.load" and keywords.get("weights_only") != "True":
            found.append(source.at(node, "torch.load without weights_only=True"))
        if name in ("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"):
            found.append(source.at(node, name))
        if keywords.get("shell", "False") != "False" or keywords.get("allow_pickle", "False") != "False":
            found.append(source.at(node, f"{name} with shell or allow_pickle"))
    return found


def hot_path_reads_no_device_value(source: Source) -> list[str]:
    """In rooms on the hot path nothing waits for the device: no read, no boolean index, no hidden synchronisation."""
    if source.room not in HOT_ROOMS:
        return []
    return [source.at(node, what) for node, what in host_reads(source)]


def host_reads(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Yield the expressions that make the host wait for the device, and the name of each."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Attribute() as function, args=arguments, keywords=keywords):
                name = dotted_name(function)
                given = {keyword.arg for keyword in keywords}
                if name.split(".")[0] in ("np", "numpy"):
                    continue
                if function.attr in HOST_READS:
                    yield node, function.attr
                elif name == "torch.where" and len(arguments) == 1:
                    yield node, "where"
                elif function.attr == "repeat_interleave" and "output_size" not in given:
                    yield node, "repeat_interleave"
                elif name == "torch.tensor" and "device" in given:
                    yield node, "tensor"
            case ast.Subscript(slice=index) if _is_boolean_index(index):
                yield node, "boolean index"


def modules_are_described(source: Source) -> list[str]:
    """Every module, and every public class and function, has a docstring."""
    found = []
    if not ast.get_docstring(source.tree):
        found.append(source.at(source.tree, "module without docstring"))
    for node in _public(source.tree):
        if not node.name.startswith("__") and not ast.get_docstring(node) and not _repeats_another(node):
            found.append(source.at(node, f"{node.name} without docstring"))
    return found


def signatures_are_typed(source: Source) -> list[str]:
    """Every parameter and result of a public function has a type."""
    found = []
    for node in _public(source.tree):
        if isinstance(node, ast.ClassDef):
            continue
        spec = node.args
        arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
        untyped = [
            argument.arg
            for argument in arguments
            if argument.annotation is None and argument.arg not in ("self", "cls")
        ]
        if untyped:
            found.append(source.at(node, f"{node.name}: no type for {', '.join(untyped)}"))
        if node.returns is None:
            found.append(source.at(node, f"{node.name}: no type for the result"))
    return found


def errors_name_what_the_user_wrote(source: Source) -> list[str]:
    """A ConfigError names a flag, an environment variable or a place, not a field of the code."""
    return [
        source.at(node, f"ConfigError about {ast.unparse(field)}")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and dotted_name(node.func).split(".")[-1] == "ConfigError"
        for field in (node.args or [keyword.value for keyword in node.keywords if keyword.arg == "field"])[:1]
        if not _is_as_written(field)
    ]


def nothing_is_left_for_later(source: Source) -> list[str]:
    """No reminders and no stubs."""
    return [
        f"{source.path}:{number}: {match.group()}"
        for number, line in enumerate(source.text.splitlines(), start=1)
        for match in UNFINISHED.finditer(line)
    ]


def foreign_text(path: str, text: str) -> list[str]:
    """Paths of one machine and marks of an unfinished merge, in any text file."""
    lines = [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()!r} names a path of one machine"
        for match in MACHINE_PATHS.finditer(text)
    ]
    return lines + [f"{path}: conflict mark" for _ in CONFLICT.finditer(text)]


RULES: tuple[Rule, ...] = (
    imports_go_down,
    rooms_are_known,
    files_are_short,
    functions_are_short,
    parameters_are_few,
    no_global,
    names_say_something,
    one_file_reads_the_environment,
    nothing_is_executed_from_data,
    hot_path_reads_no_device_value,
    modules_are_described,
    signatures_are_typed,
    errors_name_what_the_user_wrote,
    nothing_is_left_for_later,
)
"""All rules about one source file."""


def _public(tree: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield public classes and functions, and the public and special methods of public classes."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            is_special = child.name.startswith("__") and child.name.endswith("__")
            if child.name.startswith("_") and not (is_special and isinstance(tree, ast.ClassDef)):
                continue
            yield child
            if isinstance(child, ast.ClassDef):
                yield from _public(child)
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _public(child)


def _repeats_another(node: ast.AST) -> bool:
    """Whether a function is an overload or a setter, described where its other half stands."""
    decorators = [dotted_name(decorator) for decorator in getattr(node, "decorator_list", [])]
    return any(name.split(".")[-1] in ("overload", "setter", "deleter") for name in decorators)


def _is_as_written(field: ast.expr) -> bool:
    """Whether an expression may be a name that a user writes: literals must look like one, others are trusted."""
    match field:
        case ast.Constant(value=str() as text):
            return text.startswith("--") or text.isupper()
        case ast.JoinedStr(values=[ast.Constant() as first, *_]):
            return _is_as_written(first)
        case ast.IfExp(body=first, orelse=second):
            return _is_as_written(first) and _is_as_written(second)
    return True


def _is_boolean_index(index: ast.expr) -> bool:
    match index:
        case ast.Compare() | ast.UnaryOp(op=ast.Invert()):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return "mask" in name or name.startswith("is_")
    return False
