"""The tables of docs/map.md: rows for modules, trainers and losses, from their docstrings.

``python testing/source_map.py --write`` brings the page up to date; without it, tells what differs.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Iterator

from sources import PACKAGES, ROOT, sources

PAGE = ROOT / "docs" / "map.md"
MARK = "<!-- From here on written by testing/source_map.py; the words are the docstrings'. -->\n"


def summary(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    """First paragraph of a docstring as the text of a table's cell."""
    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    return text.replace("|", r"\|").removesuffix(".")


def definitions(package: str, below: str) -> dict[str, str]:
    """Summaries of all classes and functions in modules whose name starts with ``below``."""
    found = {}
    for source in sources(package):
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and source.name.startswith(below):
                found[node.name] = summary(node)
    return found


def exported(package: str, module: str) -> list[str]:
    """The names in a module's ``__all__``, read without importing it."""
    (source,) = (s for s in sources(package) if s.name == module)
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    return []


def table(head: str, rows: dict[str, str]) -> str:
    """A table of names and what they are."""
    lines = [f"| {head} |", "|---|---|", *(f"| `{name}` | {rows[name]} |" for name in rows)]
    return "\n".join(lines) + "\n\n"


def tables() -> Iterator[str]:
    """The page's sections, from the trainers down to the tensors."""
    for package in reversed(PACKAGES):
        modules = {
            source.name: summary(source.tree)
            for source in sources(package)
            if not source.name.split(".")[-1].startswith("_")
        }
        yield f"## {package}\n\n" + table("module | what it holds", modules)
        if package == "rl-trainers":
            known = definitions(package, "rl_trainers")
            names = [n for n in exported(package, "rl_trainers") if n.endswith("Trainer")]
            rows = {f"rl_trainers.{name}": known[name] for name in names}
            yield table("trainer | method", rows)
        if package == "rl-ops":
            known = definitions(package, "rl_ops.losses")
            names = [n for n in exported(package, "rl_ops.losses") if n in known and n.islower()]
            rows = {f"rl_ops.losses.{name}": known[name] for name in names}
            yield table("loss, or what losses are averaged with | what it is", rows)


def up_to_date() -> str:
    """The page as it should be."""
    above = PAGE.read_text(encoding="utf-8").split(MARK)[0]
    return above + MARK + "\n" + "".join(tables()).rstrip() + "\n"


def difference() -> str:
    """What differs between the page and the sources."""
    now = PAGE.read_text(encoding="utf-8").splitlines()
    lines = difflib.unified_diff(now, up_to_date().splitlines(), "page", "sources", n=0)
    return "\n".join(lines)


def undescribed() -> list[str]:
    """Names whose row would be empty, since they have no docstring."""
    return re.findall(r"^\| `([\w.]+)` \|  \|$", "".join(tables()), re.MULTILINE)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(up_to_date(), encoding="utf-8")
    else:
        print(difference())
        sys.exit(bool(difference()))
