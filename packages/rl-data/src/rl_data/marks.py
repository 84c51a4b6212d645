"""Invisible marks around the values of messages, to find where a template writes each of them.

A chat template is a program; the only exact way to learn where it puts a message is to let it print one that
can be recognised. Every text of the messages is wrapped in two private-use characters of its own; the marked
rendering without its marks must equal the plain rendering, else the marks are not used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

FIRST = 0x100000
LAST = 0x10FFEF
MOST_TEXTS = (LAST - FIRST) // 2
GENERATION_START = "\U0010fff0"
GENERATION_END = "\U0010fff1"
_MARKS = re.compile("[\U00100000-\U0010fffd]")
_GENERATION_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")

TEXT_KEYS = ("content", "reasoning_content", "thinking", "reasoning")
Level = Literal["both", "end", "none"]


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
    """A rendering without its marks, the marks of messages, and the ranges of ``{% generation %}`` blocks."""

    text: str
    marks: list[Mark]
    generations: list[tuple[int, int]]


def has_marks(text: str) -> bool:
    """Whether a text holds characters that are used as marks."""
    return _MARKS.search(text) is not None


class Marker:
    """Hands out marks, and remembers which message each marked text belongs to."""

    def __init__(self) -> None:
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
        if not core or len(self.owners) >= MOST_TEXTS:
            return text
        code = FIRST + 2 * len(self.owners)
        self.owners.append(index)
        start = text.index(core[0])
        left = chr(code) if both else ""
        return text[:start] + left + core + chr(code + 1) + text[start + len(core) :]


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


def read_marks(rendered: str) -> Marked:
    """Take the marks out of a rendering and say where they were."""
    pieces: list[str] = []
    marks: list[Mark] = []
    generations: list[tuple[int, int]] = []
    position = taken = begun = 0
    for found in _MARKS.finditer(rendered):
        piece = rendered[taken : found.start()]
        pieces.append(piece)
        position += len(piece)
        taken = found.end()
        code = ord(found.group())
        if found.group() == GENERATION_START:
            begun = position
        elif found.group() == GENERATION_END:
            generations.append((begun, position))
        else:
            marks.append(Mark(position, (code - FIRST) // 2, (code - FIRST) % 2 == 0))
    pieces.append(rendered[taken:])
    return Marked("".join(pieces), marks, generations)


def with_printed_generation_tags(template: str) -> str | None:
    """A template whose ``{% generation %}`` tags print marks instead; None for a template without the tags.

    An if-block stands for each tag, so that jinja's white-space rules for block tags stay as they were.
    """
    if not _GENERATION_TAG.search(template):
        return None

    def printed(tag: re.Match[str]) -> str:
        character = GENERATION_END if tag.group(2) else GENERATION_START
        return f"{{%{tag.group(1)} if true %}}{{{{ '{character}' }}}}{{% endif {tag.group(3)}%}}"

    return _GENERATION_TAG.sub(printed, template)


def texts_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """All text of the messages in one string, to search it."""
    return str(messages)
