"""Prompts: splitting them off preference pairs, and tokenising them for generation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .chat import render_prompt
from .encoding import Encoder, common_prefix_length
from .formats import is_conversational, is_message_list

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What opens and closes a reasoning block, as templates write it into a generation prompt.
_TAGS = r"(?:seed:)?(?:think|thinking|thought|reasoning)"
_REASONING = re.compile(
    rf"(?P<open><{_TAGS}>|\[THINK\]|◁think▷|<\|START_THINKING\|>|<\|begin_of_thought\|>"
    r"|<\|channel\|?>(?:analysis|thought)|<\|inner_prefix\|>)"
    rf"|(?P<close></{_TAGS}>|\[/THINK\]|◁/think▷|<\|END_THINKING\|>|<\|end_of_thought\|>"
    r"|<channel\|>|<\|end\|>|<\|inner_suffix\|>)"
)


class TokenizedPrompt(NamedTuple):
    """A prompt ready for generation.

    Attributes:
        ids: token ids, with at most one BOS in front and no EOS that the tokenizer would append.
        text: the rendered text that the ids stand for.
        opened: whether the prompt ends inside a reasoning block that the template opened.
    """

    ids: list[int]
    text: str
    opened: bool


def extract_prompt(example: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Split the shared beginning off ``chosen`` and ``rejected``.

    Texts are split at the first differing character; a single space before it goes with the
    completions, as tokenizers attach a space to the word after it. Conversations are split at the
    first differing message. Where one side is the beginning of the other, or both are equal, that
    side's completion is empty; the preparation of preference data drops such rows and counts them.

    Raises:
        ValueError: a side is missing, or one side is text and the other a conversation.

    Example:
        >>> extract_prompt({"chosen": "The sky is blue.", "rejected": "The sky is green."})
        {'prompt': 'The sky is', 'chosen': ' blue.', 'rejected': ' green.'}
    """
    chosen, rejected = example.get("chosen"), example.get("rejected")
    if not (
        (isinstance(chosen, str) and isinstance(rejected, str))
        or (isinstance(chosen, (list, tuple)) and isinstance(rejected, (list, tuple)))
    ):
        raise ValueError(
            f"chosen is {type(chosen).__name__} and rejected is {type(rejected).__name__}: want "
            "two "
            "texts or two lists of messages"
        )
    split = common_prefix_length(chosen, rejected)
    if (
        isinstance(chosen, str)
        and 0 < split < max(len(chosen), len(rejected))
        and chosen[split - 1] == " "
    ):
        split -= 1
    return {"prompt": chosen[:split], "chosen": chosen[split:], "rejected": rejected[split:]}


def maybe_extract_prompt(example: Mapping[str, Any]) -> dict[str, Any]:
    """`extract_prompt` where a preference row has no explicit prompt; any other row unchanged.

    A row whose ``prompt`` is text although its sides are conversations (a leftover column) is split
    too.

    Example:
        >>> maybe_extract_prompt({"prompt": "2+2=", "chosen": "4", "rejected": "5"})
        {'prompt': '2+2=', 'chosen': '4', 'rejected': '5'}
    """
    if example.get("chosen") is None or example.get("rejected") is None:
        return dict(example)
    prompt = example.get("prompt")
    if prompt is not None and is_message_list(prompt) == is_message_list(example["chosen"]):
        return dict(example)
    return {**example, **extract_prompt(example)}


def tokenize_prompt(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: list[Any] | None = None,
    **chat_template_kwargs: Any,
) -> TokenizedPrompt:
    """Render and tokenise the ``prompt`` of a row for generation.

    A conversation is rendered with the template and the generation prompt (one that ends in an
    assistant message is continued); its ids are those of the text alone, as the template writes its
    own BOS. Plain text gets what the tokenizer puts in front (BOS), once, even if the text spells
    it already. Special tokens spelled in the messages (but the assistant's) are encoded as ordinary
    text.

    Args:
        row: holds ``prompt`` (text or messages), or ``messages``; may hold ``tools`` and
            ``chat_template_kwargs``.
        tokenizer: a transformers tokenizer.
        tools: tools offered to the model, for rows without a ``tools`` column of their own.
        **chat_template_kwargs: passed to the template, e.g. ``enable_thinking=False``.

    Raises:
        ValueError: no prompt, a prompt of another type, or an empty one.

    Example:
        >>> tokenize_prompt({"prompt": "2+2="}, tokenizer).ids  # doctest: +SKIP
        [1, 28, 19, 28, 31]
    """
    prompt = row.get("prompt") if row.get("prompt") is not None else row.get("messages")
    encoder = Encoder.of(tokenizer)
    if isinstance(prompt, str):
        ids = encoder.prompt_ids(prompt)
        if not ids:
            raise ValueError(
                "column 'prompt' is an empty text and the tokenizer adds no BOS: nothing to "
                "continue"
            )
        return TokenizedPrompt(ids, prompt, _ends_in_reasoning(prompt, from_text=True))
    if not is_conversational({"prompt": prompt}):
        raise ValueError(
            f"column 'prompt' is {type(prompt).__name__} {str(prompt)[:60]!r}: want a text or a "
            "non-empty list "
            "of messages with roles"
        )
    rendered = render_prompt(
        {**row, "prompt": prompt}, tokenizer, tools=tools, **chat_template_kwargs
    )
    ids = encoder.encode(rendered.text, rendered.plain).ids
    opened = _ends_in_reasoning(rendered.text[rendered.tail_start :])
    return TokenizedPrompt(encoder.without_doubled_bos(ids), rendered.text, opened)


def _ends_in_reasoning(text: str, *, from_text: bool = False) -> bool:
    tags = list(_REASONING.finditer(text))
    if not tags or tags[-1].lastgroup != "open":
        return False
    # In a plain text the tag may be talked about; only one at the very end opens a block.
    return not from_text or not text[tags[-1].end() :].strip()
