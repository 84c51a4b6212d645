"""What a row is: its format, whether it is a conversation, and conversion to ChatML messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Format = Literal[
    "tokenized",
    "language_modeling",
    "prompt_only",
    "prompt_completion",
    "preference",
    "unpaired_preference",
]

CONVERSATION_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}


def is_message_list(value: Any) -> bool:
    """Whether ``value`` is a non-empty list whose items are all messages (mappings with a role)."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, (str, bytes))
        and len(value) > 0
        and all(isinstance(m, Mapping) and m.get("role") is not None for m in value)
    )


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Whether a row holds lists of messages rather than plain strings.

    Looks at the columns ``messages``, ``prompt``, ``completion``, ``chosen`` and ``rejected``.

    Example:
        >>> is_conversational({"prompt": [{"role": "user", "content": "Hi"}]})
        True
        >>> is_conversational({"prompt": "Hi"})
        False
    """
    return any(is_message_list(example.get(column)) for column in CONVERSATION_COLUMNS)


def detect_format(example: Mapping[str, Any], text_field: str = "text") -> Format:
    """Name the format of a row from the columns it fills.

    A column that is None counts as missing, as Arrow tables fill absent columns with None.

    Raises:
        ValueError: no known combination of columns; the message lists the ones that were seen.

    Example:
        >>> detect_format({"prompt": "2+2=", "completion": "4"})
        'prompt_completion'
    """
    filled = {key for key, value in example.items() if value is not None}
    if example and not filled:
        names = sorted(map(str, example))
        raise ValueError(f"columns {names} are all None in this row: fill it or drop it")
    if "input_ids" in filled:
        return "tokenized"
    if {"chosen", "rejected"} <= filled:
        return "preference"
    if len(filled & {"chosen", "rejected"}) == 1:
        missing = ({"chosen", "rejected"} - filled).pop()
        raise ValueError(f"column {missing!r} is None or missing, want the other side of the pair")
    if {"prompt", "completion", "label"} <= filled:
        return "unpaired_preference"
    if {"prompt", "completion"} <= filled:
        return "prompt_completion"
    if "messages" in filled or text_field in filled:
        return "language_modeling"
    if "prompt" in filled:
        return "prompt_only"
    raise ValueError(
        f"row with filled columns {sorted(map(str, filled))}: want input_ids, {text_field!r}, "
        "messages, "
        "prompt, "
        "prompt + completion (+ label) or chosen + rejected; rename your columns or pass "
        "dataset_text_field / formatting_func"
    )


def maybe_convert_to_chatml(example: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``conversations`` of ``from``, ``value`` into ``messages`` of ``role``, ``content``.

    ShareGPT's role names become the usual ones (human: user, gpt: assistant, observation: tool).
    Rows that are ChatML already, or no conversation, come back unchanged. The row passed in is not
    modified.

    Raises:
        ValueError: the row fills both ``conversations`` and ``messages``.

    Example:
        >>> maybe_convert_to_chatml({"conversations": [{"from": "human", "value": "Hi"}]})
        {'messages': [{'role': 'user', 'content': 'Hi'}]}
    """
    row = dict(example)
    for column in (*CONVERSATION_COLUMNS, "conversations"):
        if isinstance(row.get(column), list):
            row[column] = [_chatml_message(message) for message in row[column]]
    if row.get("conversations") is not None:
        if row.get("messages") is not None:
            raise ValueError(
                "row fills both 'conversations' and 'messages': keep one of the two columns"
            )
        row["messages"] = row.pop("conversations")
    return row


def _chatml_message(message: Any) -> Any:
    if not isinstance(message, Mapping) or message.get("role") is not None:
        return message
    renamed = dict(message)
    if "from" in renamed:
        role = renamed.pop("from")
        renamed["role"] = SHAREGPT_ROLES.get(role, role)
    if "value" in renamed:
        renamed["content"] = renamed.pop("value")
    return renamed
