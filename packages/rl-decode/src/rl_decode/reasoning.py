"""Splitting a completion into reasoning and answer, and the inverse.

The outcome of every shape a completion can take stands in one table in the documentation,
which the tests run.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple

from rl_decode._code import CodeMap
from rl_decode.channels import scan_channels
from rl_decode.formats import FORMATS, ReasoningFormat, recognise_format, resolve_format

State = Literal["complete", "incomplete", "absent"]
Kind = Literal["marker", "reasoning", "commentary", "answer"]


class Segment(NamedTuple):
    """A stretch of a completion; the texts of all its segments, joined, are the completion.

    Attributes:
        kind: "marker", "reasoning", "answer", or "commentary" (shown to a reader, but standing
            before or between blocks of reasoning, so not the answer).
        text: the stretch, untouched.
    """

    kind: Kind
    text: str


class Reasoned(NamedTuple):
    """A completion, split.

    Attributes:
        reasoning: the blocks' contents without the white space around them, several joined by a
            blank line.
        answer: what follows the last block; "" while a block is open; the whole text where there
            is no block.
        state: "complete" (each block closed), "incomplete" (the last one is open) or "absent".
    """

    reasoning: str
    answer: str
    state: State


def split_reasoning(
    text: str, *, format: str | ReasoningFormat | None = "auto", opened: bool = False
) -> Reasoned:
    r"""Split a text into its reasoning and its answer.

    A closing marker ends the reasoning, whatever opened it: a marker before it, the prompt, or
    nothing that is left. The answer is what follows the last of them. White space between a block
    and the answer is dropped, indentation of the answer's first own line is not. A marker inside
    code that closes again is text. Markers match letter by letter, case included.

    Args:
        text: a completion with its markers still in it.
        format: a name in `FORMATS`, a `ReasoningFormat`, None for text that has no reasoning, or
            "auto": the format whose marker comes first in the text.
        opened: the prompt ended inside a block, so the text begins in one.

    Returns:
        ``Reasoned(reasoning, answer, state)``.

    Raises:
        TypeError: the text is not a string.
        ValueError: an unknown format.

    Example:
        >>> split_reasoning("<think>\n2 + 2\n</think>\n\n4")
        Reasoned(reasoning='2 + 2', answer='4', state='complete')
        >>> split_reasoning("2 + 2 is", opened=True)
        Reasoned(reasoning='2 + 2 is', answer='', state='incomplete')
        >>> split_reasoning("4")
        Reasoned(reasoning='', answer='4', state='absent')
    """
    segments, state = _scan(text, format, opened)
    thoughts = [part.text.strip() for part in segments if part.kind == "reasoning"]
    reasoning = "\n\n".join(thought for thought in thoughts if thought)
    answers = [part.text for part in segments if part.kind == "answer"]
    if state == "incomplete" or not answers:
        return Reasoned(reasoning, "", state)
    if len(segments) == 1:  # no marker at all: nothing was removed, so nothing is trimmed
        return Reasoned(reasoning, answers[-1], state)
    return Reasoned(reasoning, _after_block(answers[-1]), state)


def reasoning_segments(
    text: str, *, format: str | ReasoningFormat | None = "auto", opened: bool = False
) -> list[Segment]:
    """Partition a text exactly: the segments' texts, joined, are the text.

    Takes and raises what `split_reasoning` does. Use it to see what stands between blocks, or how
    long the reasoning was.

    Example:
        >>> [part.kind for part in reasoning_segments("Well. <think>a</think>b")]
        ['commentary', 'marker', 'reasoning', 'marker', 'answer']
    """
    return _scan(text, format, opened)[0]


def render_reasoning(
    reasoning: str, answer: str, *, format: str | ReasoningFormat = "think"
) -> str:
    r"""Write reasoning and answer the way a format does; `split_reasoning` is the inverse.

    The inverse is exact for parts without the format's markers outside code and without white
    space at their ends, as long as code fences close in the part that opened them.

    Example:
        >>> render_reasoning("2 + 2", "4", format="mistral")
        '[THINK]\n2 + 2\n[/THINK]\n\n4'
    """
    row = resolve_format(format)
    if row is None:
        raise ValueError(f"format={format!r} names no format to write; choose one of {[*FORMATS]}")
    if row.channels:
        return f"{row.open}{reasoning}{row.close}<|start|>assistant{row.answer_open}{answer}"
    if row.answer_open:
        answer = f"{row.answer_open}\n{answer}\n{row.answer_close}"
    return f"{row.open}\n{reasoning}\n{row.close}\n\n{answer}"


# What a turn may begin or end with. After one of these, an earlier opening marker is history.
_TURN = re.compile(
    r"<\|[^<>|\s]{1,40}\|?>|<[^<>|\s]{1,40}\|>|</?s>|\[/?[A-Z_]{2,30}\]|<(?:start|end)_of_turn>"
    r"|<｜[^<>\s]{1,40}｜>"
)


def opens_reasoning(prompt: str, *, format: str | ReasoningFormat | None = "auto") -> bool:
    r"""Whether a rendered prompt ends inside a block of reasoning that its template opened.

    Looks only at the text after the last opening marker: a closing marker or a turn marker there
    means that the block is history or the user's.

    Example:
        >>> opens_reasoning("<|im_start|>assistant\n<think>\n")
        True
        >>> opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        False
    """
    _require_text(prompt)
    row = resolve_format(format)
    rows = [row] if row is not None else [r for r in FORMATS.values() if r.in_text]
    if format is None:
        return False
    for candidate in rows:
        _, marker, tail = prompt.rpartition(candidate.open)
        if marker and candidate.close not in tail and not _TURN.search(tail):
            return True
    return False


def _scan(
    text: str, choice: str | ReasoningFormat | None, opened: bool
) -> tuple[list[Segment], State]:
    _require_text(text)
    row = resolve_format(choice)
    if row is None and choice is not None:
        row = recognise_format(text, opened=opened)
    if row is None:
        if opened:
            return [Segment("reasoning", text)], "incomplete"
        return [Segment("answer", text)], "absent"
    if row.channels:
        channel_parts, state = scan_channels(text, opened)
        return [Segment(kind, part) for kind, part in channel_parts], state
    return _scan_tags(text, row, opened)


def _scan_tags(text: str, row: ReasoningFormat, opened: bool) -> tuple[list[Segment], State]:
    code = CodeMap(text) if "`" in text or "~~~" in text else None
    segments: list[Segment] = []
    inside, closed, region = opened, False, 0
    for match in _marker_pattern(row.open, row.close).finditer(text):
        opens = match.group() == row.open
        if opens and inside:
            continue
        if code is not None and code.encloses(match.start(), match.end(), region):
            continue
        kind: Kind = "commentary" if opens else "reasoning"
        segments.append(Segment(kind, text[region : match.start()]))
        segments.append(Segment("marker", match.group()))
        inside, closed, region = opens, closed or not opens, match.end()
    if inside:
        segments.append(Segment("reasoning", text[region:]))
        return _not_empty(segments), "incomplete"
    segments.extend(_answer_segments(text[region:], row))
    return _not_empty(segments), "complete" if closed else "absent"


def _answer_segments(text: str, row: ReasoningFormat) -> list[Segment]:
    """The answer, taken out of its own markers where the format has them and the text too."""
    if not row.answer_open or row.answer_open not in text:
        return [Segment("answer", text)]
    before, opener, rest = text.partition(row.answer_open)
    answer, closer, after = rest.partition(row.answer_close)
    inner = answer.strip()
    left, _, right = answer.partition(inner) if inner else ("", "", answer)
    return [
        Segment("commentary", before),
        Segment("marker", opener + left),
        Segment("answer", inner),
        Segment("marker", right + closer),
        Segment("commentary", after),
    ]


def _not_empty(segments: list[Segment]) -> list[Segment]:
    return [part for part in segments if part.text] or [Segment("answer", "")]


def _after_block(text: str) -> str:
    """Drop the white space that separates a block from the answer, keep indentation."""
    stripped = text.lstrip()
    gap = text[: len(text) - len(stripped)]
    indentation = gap.rpartition("\n")[2] if "\n" in gap else ""
    return indentation + stripped if stripped else ""


@lru_cache(maxsize=64)
def _marker_pattern(start: str, end: str) -> re.Pattern[str]:
    longest_first = sorted((start, end), key=len, reverse=True)
    return re.compile("|".join(re.escape(marker) for marker in longest_first))


def _require_text(text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(
            f"text is a {type(text).__name__}, not a string; decode ids with decode_completions"
        )
