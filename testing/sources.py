"""What the house's tests know of the repository: its packages and their sources as syntax trees."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

# The siblings that each package may import; the order is the order of the layers.
ALLOWED: dict[str, set[str]] = {
    "rl-ops": set(),
    "rl-decode": set(),
    "rl-data": {"rl-ops"},
    "rl-models": {"rl-ops"},
    "rl-trainers": {"rl-ops", "rl-decode", "rl-data", "rl-models"},
}
PACKAGES = list(ALLOWED)
MODULES = [package.replace("-", "_") for package in PACKAGES]


@dataclass(frozen=True)
class Source:
    """One source file: its import name, path and syntax tree."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def where(self) -> str:
        """The path as messages show it."""
        return str(self.path.relative_to(ROOT))


@dataclass(frozen=True)
class Import:
    """An imported top-level name; ``guarded`` if importing the module does not need it."""

    name: str
    line: int
    guarded: bool


@cache
def sources(package: str) -> tuple[Source, ...]:
    """The sources of a package, in the order of their paths."""
    base = ROOT / "packages" / package / "src"
    found = []
    for path in sorted(base.rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Source(name, path, ast.parse(path.read_text(encoding="utf-8"))))
    return tuple(found)


@cache
def metadata(package: str) -> dict[str, Any]:
    """The parsed ``pyproject.toml`` of a package."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def version(package: str) -> str:
    """The version in a package's ``_version.py``."""
    path = ROOT / "packages" / package / "src" / package.replace("-", "_") / "_version.py"
    (found,) = re.findall(r'__version__ = "([^"]+)"', path.read_text(encoding="utf-8"))
    return found


def requirement_name(requirement: str) -> str:
    """Normalised distribution name of a requirement."""
    (name,) = re.findall(r"^[\w.-]+", requirement)
    return re.sub(r"[._-]+", "-", name).lower()


def declared(package: str) -> set[str]:
    """Names of the distributions that a package always needs."""
    return {requirement_name(r) for r in metadata(package)["project"]["dependencies"]}


def optional(package: str) -> set[str]:
    """Names of the distributions that a package's extras bring, a sibling's extras included."""
    names: set[str] = set()
    for extra in metadata(package)["project"].get("optional-dependencies", {}).values():
        for requirement in extra:
            name = requirement_name(requirement)
            names |= optional(name) if name in PACKAGES else {name}
    return names


def imports(tree: ast.AST, *, guarded: bool = False) -> Iterator[Import]:
    """Every import below a node, with the imports by a literal name in a call among them.

    An import is guarded inside a function, a ``try`` or a condition (``if TYPE_CHECKING:``).
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(a.name.split(".")[0], node.lineno, guarded) for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield Import(node.module.split(".")[0], node.lineno, guarded)
        elif isinstance(node, ast.Call) and called_name(node) in {"import_module", "find_spec"}:
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield Import(argument.value.split(".")[0], node.lineno, True)
        opens = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try | ast.If)
        yield from imports(node, guarded=guarded or opens)


def called_name(call: ast.Call) -> str:
    """Last part of the name that a call is made by, or an empty string."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function and method below a node, with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, node
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, prefix)
