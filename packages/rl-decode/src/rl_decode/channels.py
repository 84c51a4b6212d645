"""Completions made of messages, each with a channel: OpenAI's harmony format.

Source: the harmony response format (https://cookbook.openai.com/articles/openai-harmony).
"""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["marker", "reasoning", "commentary", "answer"]
State = Literal["complete", "incomplete", "absent"]

# A header (<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>),
# the end of a message, or a header that the end of the text cuts short. Possessive repeats keep the
# search linear.
_BOUNDARY = re.compile(
    r"(?P<header>(?:<\|start\|>[^<]*+)?<\|channel\|>\s*+(?P<channel>\w++)[^<]*+"
    r"(?:<\|constrain\|>[^<]*+)?<\|message\|>)"
    r"|<\|(?:end|return|call)\|>"
    r"|(?:<\|start\|>[^<]*+)?<\|channel\|>[^<]*+(?:<\|constrain\|>[^<]*+)?\Z"
    r"|<\|start\|>[^<]*+\Z"
)
_KINDS: dict[str, Kind] = {"analysis": "reasoning", "final": "answer"}


def scan_channels(text: str, opened: bool) -> tuple[list[tuple[Kind, str]], State]:
    """Partition a text into its messages and their markers.

    What ``analysis`` holds is reasoning, the last message on ``final`` is the answer; all else
    (the commentary channel, tool calls, earlier finals, text outside messages) is commentary. A
    text without a header is one answer.

    Args:
        text: a completion, its markers in it.
        opened: the prompt ended inside an analysis message.

    Returns:
        Parts as (kind, text), whose texts joined are the text, and the state: "incomplete" while
        the text ends inside an analysis message.
    """
    matches = list(_BOUNDARY.finditer(text))
    outside: Kind = "commentary" if opened or any(m["header"] for m in matches) else "answer"
    kind: Kind = "reasoning" if opened else outside
    parts: list[tuple[Kind, str]] = []
    reasoned, position = opened, 0
    for match in matches:
        parts += [(kind, text[position : match.start()]), ("marker", match.group())]
        kind = _KINDS.get(match["channel"], "commentary") if match["header"] else outside
        reasoned = reasoned or kind == "reasoning"
        position = match.end()
    parts.append((kind, text[position:]))
    state: State = "absent" if not reasoned else "complete"
    if kind == "reasoning":
        state = "incomplete"
    return _last_answer_only([part for part in parts if part[1]]), state


def _last_answer_only(parts: list[tuple[Kind, str]]) -> list[tuple[Kind, str]]:
    answers = [place for place, (kind, _) in enumerate(parts) if kind == "answer"]
    for place in answers[:-1]:
        parts[place] = ("commentary", parts[place][1])
    return parts
