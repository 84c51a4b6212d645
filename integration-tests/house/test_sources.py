"""Sizes, homes and borders that the sources keep to."""

import ast
import importlib
import inspect

import pytest

from sources import MODULES, PACKAGES, called_name, functions, sources

MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 80
MOST_POSITIONAL_PARAMETERS = 5

# Qualified name -> why it may be larger. Keep this empty where it can be.
LONGER_FILES: dict[str, str] = {}
LONGER_FUNCTIONS: dict[str, str] = {}
MORE_POSITIONAL_PARAMETERS: dict[str, str] = {}

# Methods of named tuples: documented, in spite of their underscore.
DOCUMENTED = {"_asdict", "_fields", "_make", "_replace", "_field_defaults"}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_is_too_long_to_be_read_in_one_sitting(package):
    lengths = {s.name: len(s.path.read_text().splitlines()) for s in sources(package)}
    long = {name: n for name, n in lengths.items() if n > MOST_LINES_OF_A_FILE}
    assert not long.keys() - LONGER_FILES.keys(), long


@pytest.mark.parametrize("package", PACKAGES)
def test_every_function_fits_on_a_screen(package):
    long = {}
    for source in sources(package):
        for name, node in functions(source.tree):
            lines = node.end_lineno - node.lineno + 1
            if lines > MOST_LINES_OF_A_FUNCTION and f"{source.name}.{name}" not in LONGER_FUNCTIONS:
                long[f"{source.name}.{name}"] = lines
    assert not long


@pytest.mark.parametrize("package", PACKAGES)
def test_no_function_takes_more_than_five_arguments_by_position(package):
    many = {}
    for source in sources(package):
        for name, node in functions(source.tree):
            if any(ast.unparse(d).endswith(".jit") for d in node.decorator_list):
                continue  # a GPU kernel, called through its launcher
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            qualified = f"{source.name}.{name}"
            if count > MOST_POSITIONAL_PARAMETERS and qualified not in MORE_POSITIONAL_PARAMETERS:
                many[qualified] = names
    assert not many


@pytest.mark.parametrize("package", [p for p in PACKAGES if p != "rl-ops"])
def test_log_probs_are_computed_in_rl_ops_and_nowhere_else(package):
    calls = [
        f"{source.where}:{node.lineno}"
        for source in sources(package)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and called_name(node) in {"log_softmax", "logsumexp", "cross_entropy"}
    ]
    assert not calls, f"use rl_ops.selective_log_softmax or its fused form: {calls}"


def names_defined_in_the_sources():
    defined = set(DOCUMENTED)
    for package in PACKAGES:
        for source in sources(package):
            defined.add(source.name.rsplit(".", 1)[-1])
            for node in ast.walk(source.tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    defined.add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    defined.add(node.attr)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    defined.add(node.id)
    return defined


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_private_name_of_a_dependency_is_used(package):
    defined = names_defined_in_the_sources()
    used = []
    for source in sources(package):
        for node in ast.walk(source.tree):
            names = []
            if isinstance(node, ast.Attribute) and node.attr not in defined:
                names = [node.attr]
            elif isinstance(node, ast.Import):
                names = [p for a in node.names if not ours(a.name) for p in a.name.split(".")]
            elif isinstance(node, ast.ImportFrom) and not node.level and not ours(node.module):
                names = [*node.module.split("."), *(a.name for a in node.names)]
            used += [f"{source.where}:{node.lineno} {name}" for name in names if is_private(name)]
    assert not used


def ours(name):
    return name.split(".")[0] in {*MODULES, "__future__"}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_private_method_of_a_dependency_is_overridden(package):
    overridden = []
    for source in sources(package):
        try:
            module = importlib.import_module(source.name)
        except ModuleNotFoundError as error:
            if error.name != "triton":  # which builds of torch for CUDA bring
                raise
            continue
        for cls in vars(module).values():
            if not inspect.isclass(cls) or cls.__module__ != source.name:
                continue
            foreign = [b for b in cls.__mro__[1:] if not ours(b.__module__) and b is not object]
            for name in filter(is_private, vars(cls)):
                bases = [b.__name__ for b in foreign if name in vars(b)]
                if bases and not name.startswith(("_abc_", "_is_protocol", "_is_runtime")):
                    overridden.append(f"{source.name}.{cls.__name__}.{name} (of {bases[0]})")
    assert not overridden
