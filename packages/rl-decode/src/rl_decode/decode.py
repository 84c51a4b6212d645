"""From rows of sampled ids to what a reward function is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rl_decode._inputs import id_bounds, to_flags, to_ids, to_masks, to_rows
from rl_decode._text import TextReader
from rl_decode._trim import masked_rows, trim_rows, without_left_padding
from rl_decode._vocabulary import Vocabulary
from rl_decode.formats import FORMATS, ReasoningFormat, detect_format, resolve_format
from rl_decode.reasoning import State, split_reasoning
from rl_decode.stops import collect_stop_ids, collect_stop_strings

FinishReason = Literal["stop", "length", "stop_string", "empty"]


@dataclass(slots=True)
class Completion:
    """One completion as a reward function sees it.

    Attributes:
        ids: the sampled ids up to and including what ended them; no padding.
        raw_text: those ids as the tokenizer spells them, special tokens and the stop included.
        text: without special tokens (the markers of the reasoning format excepted), without what
            ended it (a closing marker excepted), and without a last character of which only some
            bytes were sampled.
        reasoning: what stands in the blocks of reasoning.
        answer: what follows them; "" while a block is open.
        state: "complete", "incomplete" or "absent".
        finish_reason: "stop" (a stop id), "stop_string", "length" (neither) or "empty" (no ids).
    """

    ids: list[int]
    raw_text: str
    text: str
    reasoning: str
    answer: str
    state: State
    finish_reason: FinishReason

    @property
    def ended(self) -> bool:
        """Whether the model ended the completion itself (a stop id or a stop string)."""
        return self.finish_reason in ("stop", "stop_string")


def decode_completions(
    ids: Any,
    tokenizer: Any,
    *,
    stop_ids: Iterable[int] | int | None = None,
    stop_strings: Iterable[str] | str = (),
    format: str | ReasoningFormat | None = "auto",
    opened: bool | Sequence[bool] = False,
    max_length: int | None = None,
    attention_mask: Any = None,
    out_of_range: Literal["error", "mark"] = "error",
) -> list[Completion]:
    """Decode completions, and say of each what it holds and why it ended.

    Args:
        ids: ids of the completions alone, [N, T] or N rows of any lengths; lists, arrays, tensors.
        tokenizer: their tokenizer or processor.
        stop_ids: ids that end a completion; None takes `collect_stop_ids` of the tokenizer.
        stop_strings: texts that end one. They may begin and end inside tokens.
        format: how reasoning is marked. "auto" takes what the tokenizer speaks (`detect_format`)
            and, where it speaks none, what each text shows.
        opened: the prompt ended inside a block of reasoning; one value, or one a row.
        max_length: ids after so many are cut away.
        attention_mask: [N, T], 1 where an id is real. Without it padding is found by id and
            position: runs of the padding id at either end, or what follows the first stop. It is
            needed to tell a sampled end token from padding where both are the same id.
        out_of_range: what an id outside the vocabulary does: "error", or "mark" it with U+FFFD.

    Returns:
        One `Completion` a row.

    Raises:
        TypeError: something that is no row of ids, with its place.
        ValueError: an id outside the vocabulary, with row and position; a mask of another shape.

    Example:
        >>> class Tokenizer:  # any object that decodes
        ...     eos_token_id = 0
        ...     def decode(self, ids):
        ...         return "".join("#abc"[i] for i in ids)
        >>> done = decode_completions([[1, 2, 0, 0], [3, 3]], Tokenizer())
        >>> [(c.ids, c.text, c.finish_reason) for c in done]
        [([1, 2, 0], 'ab', 'stop'), ([3, 3], 'cc', 'length')]
    """
    return _complete(
        ids,
        tokenizer,
        stops=_Stops(stop_ids, stop_strings, max_length),
        reasoning=(format, opened),
        attention_mask=attention_mask,
        out_of_range=out_of_range,
    )


def decode_and_strip_padding(
    inputs: Any,
    tokenizer: Any,
    *,
    incomplete: Literal["empty", "keep", "error"] = "empty",
    format: str | ReasoningFormat | None = "auto",
    opened: bool | Sequence[bool] = False,
    stop_ids: Iterable[int] | int | None = None,
    stop_strings: Iterable[str] | str = (),
    attention_mask: Any = None,
    out_of_range: Literal["error", "mark"] = "error",
) -> list[str]:
    """Decode rows of ids to the answers in them.

    Padding goes by id and position, never by its spelling in the text. A completed block of
    reasoning is removed and the answer after it returned; a text with no block is returned whole.
    For prompts, which hold end-of-turn tokens in their middle, pass ``stop_ids=(), format=None``.

    Args:
        inputs: ids, [N, T] or N rows of any lengths, padded on either side or not.
        tokenizer: their tokenizer or processor.
        incomplete: what a row gives whose block is opened and never closed: "empty" (""), "keep"
            (its text, markers in it), or "error".
        format: as in `decode_completions`, like everything below.
        opened: one value, or one a row.
        stop_ids: ids that end a row; what follows the first is not shown.
        stop_strings: texts that end a row.
        attention_mask: [N, T], 1 where an id is real.
        out_of_range: "error" or "mark".

    Returns:
        One string a row, without special tokens.

    Raises:
        ValueError: an incomplete row with ``incomplete="error"``; else as `decode_completions`.

    Example:
        >>> class Tokenizer:
        ...     pad_token_id = eos_token_id = 0
        ...     def decode(self, ids):
        ...         return "".join(["", "<think>", "a", "</think>", "b"][i] for i in ids)
        >>> padded = [[1, 2, 3, 4, 0], [1, 2, 0, 0, 0], [4, 0, 0, 0, 0]]
        >>> decode_and_strip_padding(padded, Tokenizer())
        ['b', '', 'b']
    """
    if incomplete not in ("empty", "keep", "error"):
        raise ValueError(f"incomplete={incomplete!r}: choose 'empty', 'keep' or 'error'")
    completions = _complete(
        inputs,
        tokenizer,
        stops=_Stops(stop_ids, stop_strings),
        reasoning=(format, opened),
        attention_mask=attention_mask,
        out_of_range=out_of_range,
        answers_only=True,
    )
    return [_answer(completion, row, incomplete) for row, completion in enumerate(completions)]


class _Stops(NamedTuple):
    ids: Iterable[int] | int | None
    strings: Iterable[str] | str
    max_length: int | None = None


def _complete(
    inputs: Any,
    tokenizer: Any,
    *,
    stops: _Stops,
    reasoning: tuple[str | ReasoningFormat | None, bool | Sequence[bool]],
    attention_mask: Any,
    out_of_range: Literal["error", "mark"],
    answers_only: bool = False,
) -> list[Completion]:
    """Decode rows; ``answers_only`` allows left padding and leaves raw texts out."""
    if stops.max_length is not None and stops.max_length < 0:
        raise ValueError(f"max_length={stops.max_length}: give a length of 0 or more, or None")
    vocabulary = Vocabulary(tokenizer)
    choice = _choose_format(reasoning[0], tokenizer)
    formats = _rows_in_question(choice)
    reader = TextReader(
        vocabulary,
        kept={token for row in formats for token in (*row.tokens, *row.markers)},
        closers={row.close for row in formats},
        out_of_range=out_of_range,
    )
    rows, pad_id = to_rows(inputs), vocabulary.pad_id
    opened = to_flags(reasoning[1], len(rows), "opened")
    if attention_mask is not None:
        rows, pad_id = masked_rows(rows, to_masks(attention_mask)), None
    elif answers_only:
        rows = [without_left_padding(row, pad_id) for row in rows]
    strings = collect_stop_strings(extra=stops.strings)
    bounds = id_bounds(inputs)
    checked = bounds is not None and reader.holds(*bounds)
    trimmed = trim_rows(
        rows,
        pad_id=pad_id,
        stops=collect_stop_ids(tokenizer) if stops.ids is None else to_ids(stops.ids, "stop_ids"),
        dropped=reader.dropped,
        max_length=stops.max_length,
    )
    completions = []
    for place, (row, is_open) in enumerate(zip(trimmed, opened, strict=True)):
        if not checked:
            reader.check(row.ids, place)
        read = reader.read(row, strings, with_raw=not answers_only)
        split = split_reasoning(read.text, format=choice, opened=is_open)
        completions.append(
            Completion(read.ids, read.raw_text, read.text, *split, finish_reason=read.reason)
        )
    return completions


def _answer(completion: Completion, row: int, incomplete: str) -> str:
    if completion.state != "incomplete":
        return completion.answer
    if incomplete == "error":
        raise ValueError(
            f"row {row} opens a block of reasoning and never closes it: "
            f"...{completion.text[-60:]!r}; raise the length limit, or pass incomplete='empty'"
        )
    return completion.text if incomplete == "keep" else ""


def _choose_format(
    format: str | ReasoningFormat | None, tokenizer: Any
) -> ReasoningFormat | str | None:
    """The row asked for; for "auto" the tokenizer's row, or "auto" to look at each text."""
    if format == "auto":
        return detect_format(tokenizer) or "auto"
    return resolve_format(format)


def _rows_in_question(choice: ReasoningFormat | str | None) -> list[ReasoningFormat]:
    """The formats in which a text may turn out to be written."""
    if choice is None:
        return []
    return [choice] if isinstance(choice, ReasoningFormat) else list(FORMATS.values())
