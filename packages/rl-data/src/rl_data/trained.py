"""Which characters of a rendered conversation are trained, and whether its prompt begins it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .encoding import Encoder, Span, common_prefix_length
from .faults import one_line
from .renderer import ChatRenderer, Rendering


def trained_spans(
    rendering: Rendering,
    messages: Sequence[Mapping[str, Any]],
    flags: Sequence[bool | None],
    trained_from: int,
    *,
    only_turns: bool,
    headers: bool,
) -> list[Span]:
    """Character ranges of the rendering that are trained.

    Args:
        rendering: the located conversation.
        messages: its messages.
        flags: each message's ``train`` flag, or None.
        trained_from: messages before this one are not trained.
        only_turns: train the assistant's turns alone, not the whole text.
        headers: train the headers of these turns too.

    Raises:
        ValueError: ``"train": true`` on a message that is not the assistant's, where only the
            assistant is trained.
    """
    for index, flag in enumerate(flags):
        if flag not in (None, True, False):
            raise ValueError(f"message {index}: 'train' is {flag!r}, want true or false")
        if flag and only_turns and messages[index]["role"] != "assistant":
            raise ValueError(
                f"message {index} ({messages[index]['role']}) has 'train': true, but only the "
                "assistant's turns are trained"
            )
    turns = {
        t.message: [(t.header, t.spans[0][0]), *t.spans] if headers and t.spans else t.spans
        for t in rendering.turns
    }
    if only_turns:
        return sorted(
            span
            for i, spans in turns.items()
            if i >= trained_from and flags[i] is not False
            for span in spans
        )
    left_out: list[Span] = []
    for index, flag in enumerate(flags):
        if flag is False:
            own = turns.get(index) or rendering.contents.get(index, [])
            if not own and str(messages[index].get("content", "")).strip():
                raise ValueError(
                    f"message {index} has 'train': false, but the template rewrites it so that it "
                    "cannot be found in the text"
                )
            left_out += own
    left_out.sort()
    spans, position = [], 0
    for start, end in left_out:
        spans.append((position, start))
        position = max(position, end)
    return [*spans, (position, len(rendering.text))]


def prompt_text_mismatch(chat: ChatRenderer, prompt: Sequence[Mapping[str, Any]], text: str) -> str:
    """How the rendered prompt differs from the beginning of the whole conversation, or ""."""
    go_on = prompt[-1]["role"] == "assistant"
    try:
        rendered = chat.render(prompt, prompt=not go_on, go_on=go_on)
    except Exception as error:  # a template may refuse the beginning alone
        return f"the template does not render the prompt alone: {one_line(error)}"
    if text.startswith(rendered):
        return ""
    shared = common_prefix_length(rendered, text)
    encoder = chat.encoder
    near = max(0, shared - 20)
    return describe_mismatch(
        encoder,
        encoder.encode(rendered[near : shared + 20]).ids,
        encoder.encode(text[near : shared + 20]).ids,
    )


def describe_mismatch(
    encoder: Encoder, prompt_ids: Sequence[int], ids: Sequence[int], shared: int | None = None
) -> str:
    """The tokens at which a prompt and the whole part ways, in words."""
    if shared is None:
        shared = common_prefix_length(prompt_ids, ids)
    tokens = encoder.tokenizer.convert_ids_to_tokens
    here, there = (
        tokens(list(prompt_ids[shared : shared + 3])),
        tokens(list(ids[shared : shared + 3])),
    )
    return f"after {shared} shared tokens the prompt goes on {here}, prompt + completion {there}"
