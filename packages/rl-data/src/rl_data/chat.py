"""Rows rendered with a chat template, as text and as prompts, from clean messages and tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .encoding import common_prefix_length
from .formats import is_conversational, is_message_list
from .nulls import clean_tools, drop_filled_nulls
from .renderer import ChatRenderer, Rendering

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MESSAGE_FLAGS = ("train",)
_ROLE = re.compile(r"[\w .:/-]+")


def apply_chat_template(
    example: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    tools: list[Any] | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    r"""Render the conversations of a row as text.

    ``messages`` become ``text``; ``prompt`` is rendered with the generation prompt (or left open if
    the assistant speaks last), and ``completion``, ``chosen`` and ``rejected`` are what follows it.
    Where a completion does not begin with the whole rendered prompt (a template may open a
    reasoning block in the prompt alone), the prompt is their true common beginning. Other columns
    are not copied, but ``label`` is.

    Args:
        example: a conversational row; may hold ``tools`` and ``chat_template_kwargs`` of its own.
        tokenizer: a transformers tokenizer with a chat template.
        tools: tools for rows without their own.
        **template_kwargs: passed to the template.

    Raises:
        ValueError: the row's combination of columns is unknown, or a conversation is no list of
            messages.

    Example:
        >>> row = {"messages": [{"role": "user", "content": "Hi"}]}
        >>> apply_chat_template(row, tokenizer)  # doctest: +SKIP
        {'text': '<|im_start|>user\nHi<|im_end|>\n'}
    """
    keys = {
        k
        for k in ("messages", "prompt", "completion", "chosen", "rejected")
        if example.get(k) is not None
    }
    allowed = (
        {"messages"},
        {"prompt"},
        {"prompt", "completion"},
        {"prompt", "chosen", "rejected"},
        {"chosen", "rejected"},
    )
    if keys not in allowed:
        raise ValueError(
            f"row with columns {sorted(keys)}: want one of {[sorted(a) for a in allowed]}"
        )
    chat = renderer(example, tokenizer, tools, template_kwargs)
    columns = {key: clean_messages(example[key], key) for key in keys}
    output: dict[str, Any] = {}
    if "messages" in keys:
        output["text"] = chat.render(columns["messages"])
    elif "prompt" in keys:
        go_on = columns["prompt"][-1]["role"] == "assistant"
        prompt = chat.render(columns["prompt"], prompt=not go_on, go_on=go_on)
        sides = {k: chat.render([*columns["prompt"], *columns[k]]) for k in keys - {"prompt"}}
        shared = prompt[
            : min(common_prefix_length(prompt, side) for side in [prompt, *sides.values()])
        ]
        output["prompt"] = shared
        output.update(
            {k: sides[k][len(shared) :] for k in ("completion", "chosen", "rejected") if k in sides}
        )
    else:
        output.update({k: chat.render(columns[k]) for k in ("chosen", "rejected")})
    if "label" in example:
        output["label"] = example["label"]
    return output


def maybe_apply_chat_template(
    example: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    tools: list[Any] | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """`apply_chat_template` for conversational rows, plain rows unchanged.

    Example:
        >>> maybe_apply_chat_template({"prompt": "2+2="}, None)
        {'prompt': '2+2='}
    """
    if is_conversational(example):
        return apply_chat_template(example, tokenizer, tools, **template_kwargs)
    return dict(example)


def clean_messages(messages: Any, column: str, feature: Any = None) -> list[dict[str, Any]]:
    """Messages as a template wants them: filled nulls and our own flags removed.

    Raises:
        ValueError: not a non-empty list of messages with roles; the text names the column.
    """
    if not is_message_list(messages):
        shown = repr(messages)[:80]
        raise ValueError(
            f"column {column!r} holds {shown}: want a non-empty list of messages with a 'role' each"
        )
    sub = getattr(feature, "feature", None)
    cleaned = []
    for place, message in enumerate(messages):
        kept = drop_filled_nulls(message, sub)
        for flag in MESSAGE_FLAGS:
            kept.pop(flag, None)
        if not isinstance(kept["role"], str):
            raise ValueError(
                f"column {column!r}, message {place}: role is {kept['role']!r}, want a text"
            )
        if not _ROLE.fullmatch(kept["role"]):
            raise ValueError(
                f"column {column!r}, message {place}: role is {kept['role']!r}, want a name of "
                "letters, "
                "digits, spaces and . _ - : / alone, as templates write it between control tokens"
            )
        content = kept.get("content", "")
        if not isinstance(content, (str, list)):
            raise ValueError(
                f"column {column!r}, message {place}: content is {type(content).__name__}, want a "
                "text or a list of parts"
            )
        kept.setdefault("content", "")
        cleaned.append(kept)
    return cleaned


def renderer(
    row: Mapping[str, Any],
    tokenizer: Any,
    tools: list[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    control_tokens: str = "user",
    tools_feature: Any = None,
) -> ChatRenderer:
    """The renderer for a row: the row's own ``tools`` and ``chat_template_kwargs`` come first."""
    own_tools = clean_tools(row.get("tools"), tools_feature)
    own_options = row.get("chat_template_kwargs") or {}
    if not isinstance(own_options, Mapping):
        raise ValueError(
            f"column 'chat_template_kwargs' is {type(own_options).__name__}, want names and values"
        )
    own_options = drop_filled_nulls(own_options)
    return ChatRenderer(
        tokenizer,
        own_tools if own_tools is not None else tools,
        {**(template_kwargs or {}), **own_options},
        control_tokens=control_tokens,
    )


def render_prompt(
    row: Mapping[str, Any],
    tokenizer: Any,
    *,
    tools: list[Any] | None = None,
    **template_kwargs: Any,
) -> Rendering:
    """Render the conversation in ``prompt`` up to where the model goes on."""
    chat = renderer(row, tokenizer, tools, template_kwargs)
    return chat.locate_prompt(clean_messages(row["prompt"], "prompt"))


def renderer_key(row: Mapping[str, Any]) -> str:
    """Equal for rows that can share a renderer."""
    tools, options = row.get("tools"), row.get("chat_template_kwargs")
    if tools is None and options is None:
        return ""
    return json.dumps([tools, options], sort_keys=True, default=repr)
