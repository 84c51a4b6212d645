"""The public names and signatures of the packages, against the stored lists.

``python testing/public_api.py`` prints what differs; with ``--write`` it stores the present state.
A change of a list in a diff is what tells a reviewer that users will notice.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

STORED = Path(__file__).parent / "public_api"
MODULES = ["rl_ops", "rl_decode", "rl_data", "rl_models", "rl_trainers"]
# Modules that are public though their package's __init__ does not export them.
FURTHER = {"rl_ops": ["rl_ops.losses.reduce"], "rl_models": ["rl_models.testing"]}


def signature(function: Any) -> str:
    """Parameters and defaults, without annotations."""
    found = inspect.signature(function)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    shown = inspect.Signature(plain)
    return str(shown)


def is_ours(cls: type) -> bool:
    """Whether a class is defined in one of the packages."""
    return cls.__module__.split(".")[0] in MODULES


def described_fields(cls: type) -> Iterator[str]:
    """Fields of a dataclass or named tuple that our classes declare, with their defaults."""
    own = {name for c in cls.__mro__ if is_ours(c) for name in vars(c).get("__annotations__", {})}
    for field in dataclasses.fields(cls):
        if field.name in own and field.init:
            empty = field.default is dataclasses.MISSING
            yield field.name if empty else f"{field.name}={field.default!r}"


def described_class(name: str, cls: type) -> Iterator[str]:
    """One line for the class, and one for each public method or property that ours define."""
    if dataclasses.is_dataclass(cls):
        yield f"{name}: dataclass"
        yield from (f"{name}.{field}" for field in described_fields(cls))
    elif any(is_ours(c) and "__init__" in vars(c) for c in cls.__mro__) or hasattr(cls, "_fields"):
        yield f"{name}{signature(cls)}"
    else:
        yield name
    members = {n: v for c in reversed(cls.__mro__) if is_ours(c) for n, v in vars(c).items()}
    for member, value in sorted(members.items()):
        plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if not member.startswith("_") and inspect.isfunction(plain):
            yield f"{name}.{member}{signature(plain)}"
        elif not member.startswith("_") and isinstance(value, property):
            yield f"{name}.{member}: property"


def public_names(module: ModuleType) -> list[str]:
    """What a module exports; what it defines without an underscore, if it has no ``__all__``."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = {n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
    return sorted(name for name in own if not name.startswith("_"))


def described_module(module: ModuleType) -> Iterator[str]:
    """A line for each public name of a module, those of exported modules included."""
    for name in public_names(module):
        value, qualified = getattr(module, name), f"{module.__name__}.{name}"
        if inspect.ismodule(value):
            yield from described_module(value)
        elif inspect.isclass(value):
            yield from described_class(qualified, value)
        elif callable(value):
            yield f"{qualified}{signature(value)}"
        elif name != "__version__":
            yield f"{qualified}: {type(value).__name__}"


def public_api(name: str) -> str:
    """The public names and signatures of a package, one a line."""
    modules = [importlib.import_module(m) for m in [name, *FURTHER.get(name, [])]]
    return "".join(f"{line}\n" for module in modules for line in described_module(module))


def difference(name: str) -> str:
    """What differs between the stored list of a package and its present state."""
    path = STORED / f"{name}.txt"
    stored = path.read_text(encoding="utf-8") if path.exists() else ""
    now = public_api(name)
    lines = difflib.unified_diff(stored.splitlines(), now.splitlines(), "stored", "now", n=0)
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print or store, and return the exit code."""
    if arguments == ["--write"]:
        STORED.mkdir(exist_ok=True)
        for name in MODULES:
            (STORED / f"{name}.txt").write_text(public_api(name), encoding="utf-8")
        return 0
    found = [difference(name) for name in MODULES]
    print("\n".join(filter(None, found)))
    return 1 if any(found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
