"""Texts of cut rows: special tokens by id, stop strings, characters cut in their middle."""

from __future__ import annotations

from typing import Literal, NamedTuple

from rl_decode._characters import REPLACEMENT, whole_characters
from rl_decode._trim import Trimmed
from rl_decode._vocabulary import Vocabulary

Reason = Literal["stop", "length", "stop_string", "empty"]


class ReadRow(NamedTuple):
    """A row with its texts; the fields are those of `rl_decode.Completion`."""

    ids: list[int]
    raw_text: str
    text: str
    reason: Reason


class TextReader:
    """Reads texts from ids; a row is decoded once where nothing in it asks for more."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        kept: set[str],
        closers: set[str],
        out_of_range: Literal["error", "mark"],
    ) -> None:
        """Prepare to read.

        Args:
            vocabulary: the tokenizer.
            kept: special tokens that stay in the text.
            closers: markers that stay in it even where they are what ends a row: without them
                the reasoning that they close would look unfinished.
            out_of_range: what an id outside the vocabulary does.
        """
        if out_of_range not in ("error", "mark"):
            raise ValueError(f"out_of_range={out_of_range!r}: choose 'error' or 'mark'")
        vocabulary.require_decode()
        self._vocabulary = vocabulary
        self._size = vocabulary.size
        self._mark = out_of_range == "mark"
        self._added = vocabulary.added_tokens()
        self.dropped = frozenset(
            i for i in vocabulary.special_ids() if self._spelling(i) not in kept
        )
        self._closers = closers
        self._plain_stops: dict[int, bool] = {}
        self._between: dict[int, bool] = {}

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
        raw = ""
        if not with_raw and not stop_strings:
            text = self._decode(row.clean)
        else:
            raw = self._decode(row.body)
            text = raw if row.shown is None else self._without_specials(raw, row)
            if stop_strings and any(string in raw for string in stop_strings):
                return self._cut_at_string(row.body, stop_strings)
            if row.reason == "stop":
                raw = self._with_stop(raw, row.ids)
        if row.reason == "length" and text.endswith(REPLACEMENT):
            text = self._whole(row.clean, text)
        if row.reason == "stop" and self._closers:
            text += self._closing(self._spelling(row.ids[-1]))
        return ReadRow(row.ids, raw, text, row.reason)

    def _closing(self, stop: str | None) -> str:
        return stop if stop in self._closers and stop is not None else ""

    def _without_specials(self, raw: str, row: Trimmed) -> str:
        """The clean text of a row, out of its raw one where that spares decoding it again."""
        body = row.body
        counts = {i: body.count(i) for i in self.dropped.intersection(body)}
        plain = REPLACEMENT not in raw and all(map(self._spelled_between, counts))
        text = raw
        for i, count in counts.items():
            spelling = self._added[i][0] if plain else ""
            if not spelling or raw.count(spelling) != count:  # some of them are ordinary text
                return self._decode(row.clean)
            text = text.replace(spelling, "")
        return text

    def _spelled_between(self, special: int) -> bool:
        """Whether a special id adds its spelling to a text and changes nothing around it."""
        if special not in self._between:
            word = self._vocabulary.encode(" x")
            alone, both = self._decode(word), self._decode([*word, special, *word])
            spelling = self._added[special][0] if special in self._added else ""
            same = bool(word and spelling) and both == alone + spelling + alone
            self._between[special] = same
        return self._between[special]

    def _clean(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i not in self.dropped]

    def _spelling(self, token_id: int) -> str | None:
        if token_id in self._added:
            return self._added[token_id][0]
        return self._vocabulary.piece(token_id)

    def _decode(self, ids: list[int]) -> str:
        return self._decode_marked(ids) if self._mark else self._vocabulary.decode(ids)

    def _whole(self, ids: list[int], text: str) -> str:
        if self._mark and ids and not self.holds(min(ids), max(ids)):
            return text  # its U+FFFD stands for an id, not for half a character
        return whole_characters(self._vocabulary, ids, text)

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
            part = ids[:middle]
            text = self._whole(part, self._decode(part))
            low, high = (low, middle) if any(s in text for s in strings) else (middle, high)
        ids = ids[:high]
        raw = self._decode(ids)
        # Of several in the last token, the one that was complete first; of these the longest.
        found = min((s for s in strings if s in raw), key=lambda s: (raw.find(s) + len(s), -len(s)))
        text = self._text_before(ids, raw, found) + self._closing(found)
        return ReadRow(ids, raw, text, "stop_string")

    def _text_before(self, ids: list[int], raw: str, stop: str) -> str:
        """Clean text before the stop string that the last of ``ids`` completes."""
        text = raw if self.dropped.isdisjoint(ids) else self._decode(self._clean(ids))
        before, found, _ = text.partition(stop)
        if found:
            return before
        # The string takes in a special token: show what ends before it, token by token.
        end = raw.find(stop)
        for count in range(len(ids) - 1, -1, -1):
            before = self._decode(ids[:count])
            if len(before) <= end and raw.startswith(before):
                part = "" if ids[count] in self.dropped else raw[len(before) : end]
                return self._decode(self._clean(ids[:count])) + part
        return ""
