"""The examples in the documentation, as code and command lines that can be run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sources import PACKAGES, ROOT

_FENCE = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_COMMANDS = ("rl-train",)


@dataclass(frozen=True)
class Example:
    """One fenced block: its language, text, and the line on which the text starts."""

    language: str
    text: str
    line: int


def pages() -> list[Path]:
    """Every page that holds examples: the READMEs and the site."""
    readmes = [ROOT / "README.md", *(ROOT / "packages" / p / "README.md" for p in PACKAGES)]
    return [*readmes, *sorted((ROOT / "docs").rglob("*.md"))]


def examples(page: Path) -> list[Example]:
    """The fenced blocks of a page, in order, their indentation removed."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        indent, language, body = match.groups()
        lines = [line.removeprefix(indent) for line in body.splitlines()]
        number = text.count("\n", 0, match.start(3)) + 1
        found.append(Example(language, "\n".join(lines) + "\n", number))
    return found


def python_of(page: Path) -> str:
    """The Python blocks of a page as one program, each on the lines where the page has it."""
    program: list[str] = []
    for example in examples(page):
        if example.language == "python":
            program += [""] * (example.line - 1 - len(program)) + example.text.splitlines()
    return "\n".join(program) + "\n" if program else ""


def commands_of(page: Path) -> list[str]:
    """Our command lines in the shell blocks of a page, each on one line."""
    found = []
    for example in examples(page):
        if example.language in ("bash", "sh", "shell", "console"):
            for line in example.text.replace("\\\n", " ").splitlines():
                words = line.removeprefix("$ ").split()
                if words and words[0] in _COMMANDS:
                    found.append(" ".join(words))
    return found
