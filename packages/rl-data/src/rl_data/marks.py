"""Invisible marks around the values of messages, to find where a template writes each of them.

A chat template is a program; the only exact way to learn where it puts a message is to let it print
one that can be recognised. Every text of the messages is wrapped in two private-use characters of
its own; the marked rendering without its marks must equal the plain rendering, else the marks are
not used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

_GENERATION_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")

TEXT_KEYS = ("content", "reasoning_content", "thinking", "reasoning")
Level = Literal["both", "end", "none"]


class Alphabet:
    """A private-use plane of Unicode whose characters serve as marks.

    The last two characters stand for the ends of ``{% generation %}`` blocks, the others in pairs
    for texts.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.most_texts = (0xFFF0 - 2) // 2
        self.generation_start = chr(first + 0xFFF0)
        self.generation_end = chr(first + 0xFFF1)
        self._escaped = f"\\U{first >> 16:04x}"
        self._pattern = re.compile(f"[{chr(first)}-{chr(first + 0xFFFD)}]")

    def is_in(self, text: str, values: str) -> bool:
        """Whether a text, or what ``repr`` shows of some values, holds any of the characters."""
        return self._escaped in values or self._pattern.search(text) is not None

    def pair(self, number: int) -> tuple[str, str]:
        """The marks before and after a text."""
        return chr(self.first + 2 * number), chr(self.first + 2 * number + 1)

    def read(self, rendered: str) -> Marked:
        """Take the marks out of a rendering and say where they were."""
        pieces: list[str] = []
        marks: list[Mark] = []
        generations: list[tuple[int, int]] = []
        position = taken = begun = 0
        for found in self._pattern.finditer(rendered):
            piece = rendered[taken : found.start()]
            pieces.append(piece)
            position += len(piece)
            taken = found.end()
            if found.group() == self.generation_start:
                begun = position
            elif found.group() == self.generation_end:
                generations.append((begun, position))
            else:
                number, closes = divmod(ord(found.group()) - self.first, 2)
                marks.append(Mark(position, number, not closes))
        pieces.append(rendered[taken:])
        return Marked("".join(pieces), marks, generations)

    def with_printed_generation_tags(self, template: str) -> str:
        """A template whose ``{% generation %}`` tags print marks instead.

        An if-block stands for each tag, so that jinja's white-space rules for block tags stay as
        they were.
        """

        def printed(tag: re.Match[str]) -> str:
            mark = self.generation_end if tag.group(2) else self.generation_start
            return f"{{%{tag.group(1)} if true %}}{{{{ '{mark}' }}}}{{% endif {tag.group(3)}%}}"

        return _GENERATION_TAG.sub(printed, template)


ALPHABETS = (Alphabet(0x100000), Alphabet(0xF0000))


def alphabet_for(text: str, values: object) -> Alphabet | None:
    """An alphabet of which neither a rendering nor the values rendered hold a character."""
    shown = repr(values)
    return next((a for a in ALPHABETS if not a.is_in(text, shown)), None)


def has_generation_tags(template: str) -> bool:
    """Whether a template marks what the model generates."""
    return _GENERATION_TAG.search(template) is not None


class Mark(NamedTuple):
    """A mark found in a rendering.

    Attributes:
        position: its place in the text without marks.
        text: number of the text that it stands beside.
        opens: whether it stands before that text, or after it.
    """

    position: int
    text: int
    opens: bool


class Marked(NamedTuple):
    """A rendering without its marks, the marks, and the ranges of ``{% generation %}`` blocks."""

    text: str
    marks: list[Mark]
    generations: list[tuple[int, int]]


class Marker:
    """Hands out marks, and remembers which message each marked text belongs to."""

    def __init__(self, alphabet: Alphabet) -> None:
        self.alphabet = alphabet
        self.owners: list[int] = []

    def message(self, message: Mapping[str, Any], index: int, level: Level) -> dict[str, Any]:
        """A copy of message ``index`` in which every text that a template may print is marked."""
        marked = dict(message)
        if level == "none":
            return marked

        def mark(text: str) -> str:
            return self._text(text, index, both=level == "both")

        for key in TEXT_KEYS:
            if key in marked:
                marked[key] = _mark_content(marked[key], mark)
        if isinstance(marked.get("tool_calls"), (list, tuple)):
            marked["tool_calls"] = [_mark_call(call, mark) for call in marked["tool_calls"]]
        return marked

    def _text(self, text: str, index: int, *, both: bool) -> str:
        # Inside the outer white space, so that a template that trims still trims.
        core = text.strip()
        if not core or len(self.owners) >= self.alphabet.most_texts:
            return text
        before, after = self.alphabet.pair(len(self.owners))
        self.owners.append(index)
        start = text.index(core[0])
        left = before if both else ""
        return text[:start] + left + core + after + text[start + len(core) :]


def _mark_content(content: Any, mark: Callable[[str], str]) -> Any:
    if isinstance(content, str):
        return mark(content)
    if isinstance(content, (list, tuple)):
        return [
            {**part, "text": mark(part["text"])}
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
    return content


def _mark_call(call: Any, mark: Callable[[str], str]) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _mark_call(call["function"], mark)}
    marked = dict(call)
    for key in ("name", "arguments"):
        if key in marked:
            marked[key] = _mark_leaves(marked[key], mark)
    return marked


def _mark_leaves(value: Any, mark: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        return {key: _mark_leaves(item, mark) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mark_leaves(item, mark) for item in value]
    return value
