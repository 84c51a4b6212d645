"""The conventions in which models write their reasoning: one row a format.

A new convention is a row in `FORMATS`; `rl_decode.reasoning` reads nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_decode._vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How one family of models marks its reasoning and, where it does, its answer.

    Attributes:
        name: what callers pass as ``format=``.
        open: the marker that opens a block of reasoning.
        close: the marker that closes it.
        answer_open: the marker before the answer, "" where the answer simply follows.
        answer_close: the marker after the answer.
        tokens: the markers' tokens. A tokenizer that has all of them speaks this format, and they
            are kept when other special tokens are removed. Empty: never chosen by a tokenizer.
        in_text: whether ``format="auto"`` may recognise the format from a text alone.
        channels: the text is a sequence of messages, each with a channel (OpenAI's harmony).
        models: who writes it, for the reader.

    Example:
        >>> notes = ReasoningFormat("notes", "<notes>", "</notes>")
        >>> from rl_decode import split_reasoning
        >>> split_reasoning("<notes>a</notes>b", format=notes).answer
        'b'
    """

    name: str
    open: str
    close: str
    answer_open: str = ""
    answer_close: str = ""
    tokens: tuple[str, ...] = ()
    in_text: bool = True
    channels: bool = False
    models: str = ""

    def __post_init__(self) -> None:
        """Refuse markers with which no text could be split."""
        if not self.open or not self.close or self.open == self.close:
            raise ValueError(
                f"format {self.name!r} has open={self.open!r}, close={self.close!r}; "
                "give two different markers, neither of them empty"
            )

    @property
    def markers(self) -> tuple[str, ...]:
        """Every marker of the format that is not empty."""
        markers = (self.open, self.close, self.answer_open, self.answer_close)
        return tuple(marker for marker in markers if marker)


def _tags(name: str, start: str, end: str, models: str) -> ReasoningFormat:
    return ReasoningFormat(name, start, end, tokens=(start, end), models=models)


_CHANNEL = "<|channel|>"

_ROWS = (
    _tags("think", "<think>", "</think>", "DeepSeek R1 and V3, Qwen 3, QwQ, GLM 4.5, SmolLM 3"),
    _tags("mistral", "[THINK]", "[/THINK]", "Magistral, Ministral 3"),
    _tags("seed", "<seed:think>", "</seed:think>", "Seed-OSS"),
    ReasoningFormat(
        "cohere",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        tokens=(
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
        ),
        models="Command A Reasoning, Command R7B",
    ),
    ReasoningFormat(
        "harmony",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        "<|channel|>final<|message|>",
        "<|return|>",
        tokens=("<|start|>", _CHANNEL, "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
        channels=True,
        models="gpt-oss",
    ),
    ReasoningFormat(
        "gemma",
        "<|channel>thought",
        "<channel|>",
        tokens=("<|channel>", "<channel|>"),
        models="Gemma 4",
    ),
    _tags("apertus", "<|inner_prefix|>", "<|inner_suffix|>", "Apertus"),
    _tags("kimi", "◁think▷", "◁/think▷", "Kimi VL Thinking, Kimi 1.5"),
    _tags("thought", "<thought>", "</thought>", "EXAONE Deep"),
    ReasoningFormat(
        "open_thoughts",
        "<|begin_of_thought|>",
        "<|end_of_thought|>",
        "<|begin_of_solution|>",
        "<|end_of_solution|>",
        models="Sky-T1, Bespoke-Stratos, OpenThinker",
    ),
    _tags("reasoning", "<reasoning>", "</reasoning>", "prompted models (GSM8K recipes)"),
    _tags("thinking", "<thinking>", "</thinking>", "prompted models"),
    # The two below are chosen by name, or by a template that spells them: their markers are
    # those of another format, or plain words that an ordinary answer may hold.
    ReasoningFormat(
        "think_answer",
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        in_text=False,
        models="R1-Zero prompts, Hunyuan A13B",
    ),
    ReasoningFormat(
        "granite",
        "Here is my thought process:",
        "Here is my response:",
        in_text=False,
        models="Granite 3.2",
    ),
)

FORMATS: dict[str, ReasoningFormat] = {row.name: row for row in _ROWS}


def resolve_format(choice: str | ReasoningFormat | None) -> ReasoningFormat | None:
    """The row that a caller asked for by name or gave; None for "auto" and for no format.

    Raises:
        ValueError: a name that no row has.
        TypeError: neither a name, a `ReasoningFormat` nor None.
    """
    if choice is None or isinstance(choice, ReasoningFormat):
        return choice
    if not isinstance(choice, str):
        raise TypeError(
            f"format is a {type(choice).__name__}; give a name, a ReasoningFormat or None"
        )
    if choice == "auto":
        return None
    if choice not in FORMATS:
        raise ValueError(f"format={choice!r} is not known; choose 'auto' or one of {[*FORMATS]}")
    return FORMATS[choice]


def detect_format(tokenizer: Any) -> ReasoningFormat | None:
    """The format that a tokenizer's vocabulary or, failing that, its chat template spells.

    Args:
        tokenizer: a tokenizer or processor.

    Returns:
        The first row of `FORMATS` of which all tokens are in the vocabulary; else the first whose
        closing marker is in the chat template; else None.

    Example:
        >>> class Tokenizer:
        ...     chat_template = "{{ message.content.split('</think>')[-1] }}"
        >>> detect_format(Tokenizer()).name
        'think'
    """
    vocabulary = Vocabulary(tokenizer)
    for row in _ROWS:
        if row.tokens and all(vocabulary.id_of(token) is not None for token in row.tokens):
            return row
    template = vocabulary.chat_template
    for row in _ROWS:
        if row.close in template and (row.channels is False or row.open in template):
            return row
    return None


def recognise_format(text: str, *, opened: bool = False) -> ReasoningFormat | None:
    """The format whose marker comes first in a text; None where the text holds no marker.

    In a text that begins inside a block only a closing marker tells, for an opening one is text.
    """
    best: tuple[int, ReasoningFormat] | None = None
    for row in _ROWS:
        if not row.in_text:
            continue
        signs = (row.close,) if opened else row.markers
        if row.channels:  # other templates end turns with harmony's <|end|>
            signs = (_CHANNEL,)
        places = [place for sign in signs if (place := text.find(sign)) >= 0]
        if places and (best is None or min(places) < best[0]):
            best = (min(places), row)
    return best[1] if best else None
