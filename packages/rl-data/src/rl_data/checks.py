"""What can be wrong with one row, seen in the row itself and in its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from .encoding import Encoder
from .formats import CONVERSATION_COLUMNS, is_message_list
from .nulls import count_filled_nulls

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "model")
TEXT_COLUMNS = ("prompt", "completion", "chosen", "rejected")


def count_nulls(row: Mapping[str, Any], features: Mapping[str, Any]) -> int:
    """None-filled keys in the row's conversations and tools."""
    return sum(
        count_filled_nulls(row[column], features.get(column))
        for column in (*CONVERSATION_COLUMNS, "tools")
        if row.get(column) is not None and not isinstance(row[column], str)
    )


def has_empty_text(row: Mapping[str, Any], text_field: str) -> bool:
    """Whether a text is blank, or a message says nothing: no text, no reasoning, no tool call."""
    for column in (text_field, *TEXT_COLUMNS, "messages"):
        value = row.get(column)
        if isinstance(value, str) and not value.strip():
            return True
        if is_message_list(value) and any(map(_is_silent, value or ())):
            return True
    return False


def _is_silent(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, str):
        content = content.strip()
    spoken = content or message.get("tool_calls") or message.get("reasoning_content")
    return not (spoken or message.get("thinking"))


def conversations(row: Mapping[str, Any]) -> Iterator[tuple[list[Mapping[str, Any]], bool]]:
    """The row's whole conversations, and whether the assistant should have the last word."""
    prompt = list(row["prompt"]) if is_message_list(row.get("prompt")) else []
    sides = [row[c] for c in ("completion", "chosen", "rejected") if is_message_list(row.get(c))]
    for side in sides:
        yield [*prompt, *side], True
    if prompt and not sides:
        yield prompt, False
    if is_message_list(row.get("messages")):
        yield list(row["messages"]), True


def role_fault(messages: Sequence[Mapping[str, Any]], *, complete: bool) -> str:
    """What is wrong with the order of roles, or "".

    Example:
        >>> role_fault([{"role": "user"}, {"role": "user"}], complete=False)
        'two user messages in a row'
    """
    roles = ["user" if m["role"] == "human" else str(m["role"]) for m in messages]
    unknown = [r for r in roles if r not in ROLES]
    if unknown:
        return f"unknown role {unknown[0]!r}"
    if any(r in ("system", "developer") for r in roles[1:]) and roles[1:2] != ["developer"]:
        return "a system message after the first place"
    spoken = [r for r in roles if r not in ("system", "developer")]
    if spoken[:1] == ["assistant"]:
        return "the assistant speaks first"
    if spoken and spoken[0] not in ("user", "assistant"):
        return f"a {spoken[0]} message comes first"
    for before, role in pairwise(spoken):
        if before == role and role not in ("tool", "function", "ipython"):
            return f"two {role} messages in a row"
        if before == "tool" and role == "user":
            return "a user message answers a tool"
    if complete and spoken and spoken[-1] not in ("assistant", "model"):
        return f"the last message is the {spoken[-1]}'s"
    return ""


def has_doubled_eos(encoder: Encoder, ids: Sequence[int]) -> bool:
    """Whether two EOS stand at the end, white space left aside."""
    if encoder.eos_id is None:
        return False
    spoken = (i for i in reversed(ids) if not encoder.is_blank(i))
    return next(spoken, None) == encoder.eos_id == next(spoken, None)
