"""Texts of cut rows: special tokens by id, stop strings, characters cut in their middle."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from rl_decode._trim import Trimmed
from rl_decode._vocabulary import Vocabulary

Reason = Literal["stop", "length", "stop_string", "empty"]

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's byte fallback


class ReadRow(NamedTuple):
    """A row with its texts; the fields are those of `rl_decode.Completion`."""

    ids: list[int]
    raw_text: str
    text: str
    reason: Reason


class TextReader:
    """Reads texts from ids; a row is decoded once where nothing in it asks for more."""

    def __init__(
        self, vocabulary: Vocabulary, kept: set[str], out_of_range: Literal["error", "mark"]
    ) -> None:
        if out_of_range not in ("error", "mark"):
            raise ValueError(f"out_of_range={out_of_range!r}: choose 'error' or 'mark'")
        self._vocabulary = vocabulary
        self._size = vocabulary.size
        self._mark = out_of_range == "mark"
        self._added = vocabulary.added_tokens()
        self.dropped = frozenset(
            i for i in vocabulary.special_ids() if self._spelling(i) not in kept
        )
        self._plain_stops: dict[int, bool] = {}

    def check(self, ids: list[int], row: int) -> None:
        """Refuse ids outside the vocabulary, unless they are to be marked.

        Raises:
            ValueError: with the row and the position of the first such id.
        """
        if self._mark or not ids or self.holds(min(ids), max(ids)):
            return
        place, wrong = next((n, i) for n, i in enumerate(ids) if not self.holds(i, i))
        hint = " (-100 marks labels that are not trained; pass the ids)" if wrong == -100 else ""
        raise ValueError(
            f"row {row}, position {place}: id {wrong} is outside the tokenizer's "
            f"{self._size} ids{hint}; keep the model from sampling it, or pass out_of_range='mark'"
        )

    def holds(self, lowest: int, highest: int) -> bool:
        """Whether all ids between two are in the vocabulary."""
        return lowest >= 0 and (self._size is None or highest < self._size)

    def read(
        self, row: Trimmed, stop_strings: tuple[str, ...] = (), *, with_raw: bool = True
    ) -> ReadRow:
        """Texts of a trimmed row, which a stop string may end earlier.

        Args:
            row: a row cut at its first stop id.
            stop_strings: texts that end a row.
            with_raw: whether the raw text is wanted; it is "" otherwise.
        """
        text, raw = self._decode(row.clean), ""
        if with_raw or stop_strings:
            raw = text if row.shown is None else self._decode(row.body)
            if stop_strings and any(string in raw for string in stop_strings):
                return self._cut_at_string(row.body, stop_strings)
            if row.reason == "stop":
                raw = self._with_stop(raw, row.ids)
        if row.reason == "length" and text.endswith(REPLACEMENT):
            text = self._without_cut_character(row.clean, text)
        return ReadRow(row.ids, raw, text, row.reason)

    def _clean(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i not in self.dropped]

    def _spelling(self, token_id: int) -> str | None:
        if token_id in self._added:
            return self._added[token_id][0]
        return self._vocabulary.piece(token_id)

    def _decode(self, ids: list[int]) -> str:
        return self._decode_marked(ids) if self._mark else self._vocabulary.decode(ids)

    def _decode_marked(self, row: list[int]) -> str:
        """Decode with U+FFFD in the place of each id that the vocabulary lacks."""
        known: list[list[int]] = [[]]
        for i in row:
            if self.holds(i, i):
                known[-1].append(i)
            else:
                known.append([])
        return REPLACEMENT.join(map(self._vocabulary.decode, known))

    def _with_stop(self, raw: str, ids: list[int]) -> str:
        """The raw text with its stop, spelled without decoding again where that is the same."""
        stop = ids[-1]
        if stop not in self._plain_stops and len(ids) > 1:
            alone, both = self._decode(ids[-2:-1]), self._decode(ids[-2:])
            spelling = self._added[stop][0] if stop in self._added else None
            self._plain_stops[stop] = spelling is not None and both == alone + spelling
        if self._plain_stops.get(stop, False):
            return raw + self._added[stop][0]
        return self._decode(ids)

    def _cut_at_string(self, ids: list[int], strings: tuple[str, ...]) -> ReadRow:
        """Keep the fewest ids whose text holds a stop string; show the text before the string."""
        low, high = 0, len(ids)  # ids[:high] hold one, ids[:low] do not
        while high - low > 1:
            middle = (low + high) // 2
            text = self._decode(ids[:middle])
            low, high = (low, middle) if any(s in text for s in strings) else (middle, high)
        ids = ids[:high]
        raw = self._decode(ids)
        # Of several in the last token, the one that was complete first; of these the longest.
        _, start = min((raw.find(s) + len(s), raw.find(s)) for s in strings if s in raw)
        return ReadRow(ids, raw, self._text_before(ids, raw, start), "stop_string")

    def _text_before(self, ids: list[int], raw: str, end: int) -> str:
        """Clean text of ``raw[:end]``, where ``raw`` is the text of ``ids``."""
        if self.dropped.isdisjoint(ids):
            return raw[:end]
        for count in range(len(ids) - 1, -1, -1):
            before = self._decode(ids[:count])
            if len(before) <= end and raw.startswith(before):
                part = "" if ids[count] in self.dropped else raw[len(before) : end]
                return self._decode(self._clean(ids[:count])) + part
        return ""

    def _without_cut_character(self, ids: list[int], text: str) -> str:
        """Hold back a last character of which the row has only the first bytes.

        A U+FFFD that the model wrote, or bytes that no further byte could mend, stay.
        """
        fallback = [_BYTE_PIECE.fullmatch(self._vocabulary.piece(i) or "") for i in ids[-3:]]
        if fallback and fallback[-1]:
            # Such decoders give up the whole run of bytes for one bad end, so decode without it.
            count = _unfinished(self._fallback_run(ids))
            return self._decode(ids[:-count]) if count else text
        tail = b"".join(_byte_level(self._vocabulary.piece(i) or "") for i in ids[-4:])
        return text[:-1] if any(_unfinished(tail[-n:]) == n for n in (1, 2, 3)) else text

    def _fallback_run(self, ids: list[int]) -> bytes:
        values: list[int] = []
        for i in reversed(ids):
            match = _BYTE_PIECE.fullmatch(self._vocabulary.piece(i) or "")
            if match is None:
                break
            values.append(int(match[1], 16))
        return bytes(reversed(values))


def _unfinished(data: bytes) -> int:
    """How many bytes at the end of UTF-8 data begin a character that lacks its rest."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        decoder.decode(data)
    except UnicodeDecodeError:
        return 0
    return len(decoder.getstate()[0])


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others: Iterable[int] = (value for value in range(256) if value not in printable)
    table = {chr(value): value for value in printable}
    table.update({chr(256 + n): value for n, value in enumerate(others)})
    return table


_BYTES = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    return bytes(_BYTES[c] for c in piece) if all(c in _BYTES for c in piece) else b""
