"""Which token or text ends a completion, and why it ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rl_decode._characters import byte_run_start, whole_characters
from rl_decode._inputs import described, to_ids, to_row
from rl_decode._vocabulary import Vocabulary
from rl_decode.formats import FORMATS, detect_format

CutReason = Literal["stop", "length", "empty"]

_NAMED_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")
_CHANNEL_STOPS = {"<|return|>", "<|call|>"}  # <|end|> ends a message, and more may follow
_PROBE = "qzprobeqz"


def collect_stop_ids(
    tokenizer: Any, generation_config: Any = None, extra: Iterable[int | str] | int | str = ()
) -> tuple[int, ...]:
    """Every id that ends a completion, whoever declares it.

    Read are the tokenizer's end tokens, the generation config's ``eos_token_id`` (one or a list),
    and the special tokens that the chat template writes after an assistant's turn, which often is
    none of the others. Give the result to the engine, and save it with the model.

    Args:
        tokenizer: a tokenizer or processor.
        generation_config: a generation config, or anything with (or a dict holding)
            ``eos_token_id``.
        extra: further ids, or tokens of the vocabulary by their spelling.

    Returns:
        Distinct ids: the tokenizer's end token first, then in the order above.

    Raises:
        ValueError: a token in ``extra`` that the vocabulary lacks, or a negative id.

    Example:
        >>> class Tokenizer:
        ...     eos_token_id = 7
        >>> collect_stop_ids(Tokenizer(), {"eos_token_id": [7, 9]})
        (7, 9)
    """
    vocabulary = Vocabulary(tokenizer)
    found: list[int] = []
    for name in _NAMED_STOPS:
        found += _ids(getattr(vocabulary.tokenizer, name, None))
    found += _ids(_read(generation_config, "eos_token_id"))
    found += _template_stops(vocabulary)
    found += _extra_ids(extra, vocabulary)
    return tuple(dict.fromkeys(found))


def collect_stop_strings(
    generation_config: Any = None, extra: Iterable[str] | str = ()
) -> tuple[str, ...]:
    r"""Every stop string that the generation config or the caller declares, without repeats.

    Raises:
        TypeError: neither a string nor a list of strings.
        ValueError: an empty string, at which every completion would end.

    Example:
        >>> collect_stop_strings({"stop_strings": ["\n\n"]}, extra="</answer>")
        ('\n\n', '</answer>')
    """
    strings: list[str] = []
    for group in (_read(generation_config, "stop_strings"), extra):
        if group is None:
            continue
        if not isinstance(group, (str, list, tuple, set, frozenset)):
            raise TypeError(f"stop_strings is {described(group)}; give a string or a list of them")
        strings += [group] if isinstance(group, str) else group
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop string {string!r}: give strings of at least one character")
    return tuple(dict.fromkeys(strings))


def cut_at_stop(
    ids: Any, stop_ids: Iterable[int] | int, *, max_length: int | None = None
) -> tuple[list[int], CutReason]:
    """Cut a completion after its first stop id.

    Args:
        ids: ids of one completion, without padding (list, tuple, array or 1-D tensor).
        stop_ids: the ids that end it.
        max_length: at most this many ids are looked at and kept.

    Returns:
        The ids up to and including the first stop, and why they end there: "stop", "length"
        (none was found) or "empty" (there are no ids).

    Raises:
        TypeError: ids that are no integers.
        ValueError: a negative ``max_length``.

    Example:
        >>> cut_at_stop([5, 6, 9, 4, 7], {7, 9})
        ([5, 6, 9], 'stop')
        >>> cut_at_stop([5, 6, 9], {7, 9}, max_length=2)
        ([5, 6], 'length')
    """
    if max_length is not None and max_length < 0:
        raise ValueError(f"max_length={max_length}: give a length of 0 or more, or None")
    row = to_row(ids)[:max_length]
    end = first_stop(row, to_ids(stop_ids, "stop_ids"))
    if end is not None:
        return row[: end + 1], "stop"
    return row, "length" if row else "empty"


def first_stop(row: Sequence[int], stop_ids: Iterable[int]) -> int | None:
    """Position of the first stop id in a row, None where it has none."""
    best: int | None = None
    for stop in stop_ids:
        try:  # list.index runs at the speed of C; a row holds few kinds of stops
            best = row.index(stop, 0, len(row) if best is None else best)
        except ValueError:
            continue
    return best


def ended_by_stop(
    completion_ids: Any, stop_ids: Iterable[int] | int, *, length: int | None = None
) -> bool:
    """Whether a completion came to its own end, for a penalty on those that did not.

    Takes the completion alone: a chat prompt always holds end-of-turn tokens, so looking at
    prompt and completion together finds one in every row.

    Args:
        completion_ids: ids of one completion.
        stop_ids: the ids that end it.
        length: how many of the ids are real. Needed where the padding id is also a stop id.

    Example:
        >>> ended_by_stop([5, 9], {9}), ended_by_stop([5, 9], {9}, length=1), ended_by_stop([], {9})
        (True, False, False)
    """
    return cut_at_stop(completion_ids, stop_ids, max_length=length)[1] == "stop"


def ends_with_stop_string(
    ids: Any, tokenizer: Any, stop_strings: Iterable[str] | str
) -> str | None:
    """The stop string that the newest token completed, for an engine to call after each token.

    Only as many of the last ids are decoded as a stop string can span, so the cost does not grow
    with the completion. The string may begin and end inside tokens.

    Args:
        ids: ids of one completion so far.
        tokenizer: its tokenizer.
        stop_strings: strings that end it.

    Returns:
        The stop string found in the text that the last token completed, None where there is none.
    """
    strings = collect_stop_strings(extra=stop_strings)
    row = to_row(ids)
    if not strings or not row:
        return None
    # A token is at least one byte, save for special ones and pieces that decode to nothing.
    window = max(len(string.encode("utf-8", "surrogatepass")) for string in strings) + 8
    vocabulary = Vocabulary(tokenizer)
    vocabulary.require_decode()
    start = max(len(row) - window, 0)
    row = row[byte_run_start(vocabulary, row, start) :]  # a run of bytes decodes as one
    try:
        text, shorter = (
            whole_characters(vocabulary, part, vocabulary.decode(part)) for part in (row, row[:-1])
        )
    except OverflowError as error:  # how tokenizers written in Rust refuse such an id
        raise ValueError(f"ids {row[-3:]} hold one outside the vocabulary: {error}") from error
    for string in strings:
        if text.count(string) > shorter.count(string):
            return string
    return None


def _read(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, dict) else getattr(source, name, None)


def _ids(declared: Any) -> list[int]:
    """Ids from None, an int, a list or a tensor; a negative one means "none" in old configs."""
    if hasattr(declared, "tolist"):
        declared = declared.tolist()
    if declared is None:
        return []
    many = declared if isinstance(declared, (list, tuple, set, frozenset)) else [declared]
    return [int(i) for i in many if isinstance(i, int) and not isinstance(i, bool) and i >= 0]


def _extra_ids(extra: Iterable[int | str] | int | str, vocabulary: Vocabulary) -> list[int]:
    ids = []
    if hasattr(extra, "tolist"):
        extra = extra.tolist()
    for item in [extra] if isinstance(extra, (int, str)) else extra:
        found = vocabulary.id_of(item) if isinstance(item, str) else item
        if found is None:
            raise ValueError(
                f"extra stop {item!r} is not a token of this vocabulary; pass it as a stop string"
            )
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise ValueError(f"extra stop {item!r}: give ids of 0 or more, or tokens")
        ids.append(found)
    return ids


def _template_stops(vocabulary: Vocabulary) -> list[int]:
    """Ids that the template writes where the assistant's turn ends.

    At the end of a conversation these are all special tokens after the assistant's words; inside
    one only the first, which may belong to the next turn (GLM ends a turn with nothing else).
    """
    last = _specials_after(vocabulary, followed=False)
    inner = _specials_after(vocabulary, followed=True)
    return [*last, *inner[:1]]


def _specials_after(vocabulary: Vocabulary, *, followed: bool) -> list[int]:
    """Special tokens after an assistant's turn, without the markers of reasoning formats."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": _PROBE}]
    if followed:
        turns.append({"role": "user", "content": "hi"})
    _, said, tail = _render(vocabulary, turns).rpartition(_PROBE)
    if not said or not tail.strip():
        return []
    spoken = detect_format(vocabulary.tokenizer)
    no_stops = {m for row in FORMATS.values() if not row.channels for m in row.markers}
    if spoken is not None and spoken.channels:  # elsewhere <|end|> does end a turn
        no_stops |= {*spoken.tokens} - _CHANNEL_STOPS
    known = {*vocabulary.special_ids(), *vocabulary.added_tokens()}
    specials = [i for i in vocabulary.encode(tail) if i in known]
    return [i for i in specials if vocabulary.piece(i) not in no_stops]


def _render(vocabulary: Vocabulary, turns: list[dict[str, str]]) -> str:
    """The rendered turns; "" where there is no template, or it refuses them."""
    render = getattr(vocabulary.tokenizer, "apply_chat_template", None)
    if not callable(render) or not vocabulary.chat_template:
        return ""
    attempts: tuple[dict[str, Any], ...] = ({}, {"tools": []})
    for keywords in attempts:  # some templates loop over tools that are not there
        try:
            return str(render(turns, tokenize=False, **keywords))
        except Exception:  # a template may refuse in any way; it then declares nothing
            continue
    return ""
