"""Text to ids with character offsets: one BOS, one EOS, and spelled control tokens kept as text."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

Span = tuple[int, int]


class Encoded(NamedTuple):
    """Token ids and the characters each one covers.

    Attributes:
        ids: token ids, ``T`` of them.
        starts: first character of each token, never decreasing; empty for tokenizers without
            offsets.
        ends: character after the last one of each token.
        text: the text that was encoded.
        plain: ranges that spell control tokens but were encoded as ordinary text.
    """

    ids: list[int]
    starts: list[int]
    ends: list[int]
    text: str
    plain: Sequence[Span] = ()


def common_prefix_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Number of leading items that two sequences share, by bisection over slices.

    Example:
        >>> common_prefix_length("The sky", "The sea")
        5
    """
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


class Encoder:
    """What a tokenizer adds around a text, computed once, and encoding that adds nothing else."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_id: int | None = tokenizer.eos_token_id
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        dressed = tokenizer("a", add_special_tokens=True)["input_ids"]
        first = next(
            (k for k in range(len(dressed)) if dressed[k : k + len(bare)] == bare), len(dressed)
        )
        self.prefix: list[int] = dressed[:first] if first < len(dressed) else []
        self.has_offsets = bool(getattr(tokenizer, "is_fast", False))
        self.added_ids = frozenset(tokenizer.added_tokens_decoder)
        self.control_tokens = _control_tokens(tokenizer)
        self.control = re.compile(any_of(self.control_tokens))
        self._blank: dict[int, bool] = {}

    @classmethod
    def of(cls, tokenizer: Any) -> Encoder:
        """The encoder of a tokenizer; the last few are kept while tokens and template stay."""
        state = (
            len(tokenizer),
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            getattr(tokenizer, "add_bos_token", None),
            str(getattr(tokenizer, "chat_template", None)),
        )
        for known_state, known in _RECENT:
            if known.tokenizer is tokenizer and known_state == state:
                return known
        encoder = cls(tokenizer)
        _RECENT.append((state, encoder))
        return encoder

    def encode(self, text: str, plain: Sequence[Span] = ()) -> Encoded:
        """Encode a text without adding special tokens.

        Args:
            text: what to encode.
            plain: character ranges that spell control tokens but are ordinary text.
        """
        return self.encode_batch([text], [plain])[0]

    def encode_batch(
        self, texts: Sequence[str], plains: Sequence[Sequence[Span]], *, offsets: bool = True
    ) -> list[Encoded]:
        """`encode` for many texts in one call of the tokenizer; without offsets it is faster."""
        whole = [k for k, plain in enumerate(plains) if not plain]
        encoded: list[Encoded | None] = [None] * len(texts)
        if whole:
            for k, item in zip(
                whole, self._call([texts[k] for k in whole], offsets=offsets), strict=True
            ):
                encoded[k] = item
        for k, plain in enumerate(plains):
            if plain:
                encoded[k] = self._encode_in_pieces(texts[k], plain)
        return [item for item in encoded if item is not None]

    def _call(
        self, texts: list[str], *, split_special: bool = False, offsets: bool = True
    ) -> list[Encoded]:
        offsets = offsets and self.has_offsets
        options = {"split_special_tokens": True} if split_special else {}
        out = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=offsets,
            verbose=False,
            **options,
        )
        if not offsets:
            return [
                Encoded(list(i), [], [], t) for i, t in zip(out["input_ids"], texts, strict=True)
            ]
        return [
            Encoded(ids, *_cover(places), text)
            for ids, places, text in zip(
                out["input_ids"], out["offset_mapping"], texts, strict=True
            )
        ]

    def _encode_in_pieces(self, text: str, plain: Sequence[Span]) -> Encoded:
        ids: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        position = 0
        for start, end in [*plain, (len(text), len(text))]:
            pieces = [(position, start, False)] if start > position else []
            if end > start:
                pieces.append((start, end, True))
            for left, right, as_text in pieces:
                piece = self._encode_piece(text[left:right], as_text=as_text, first=left == 0)
                ids += piece.ids
                starts += [left + s for s in piece.starts]
                ends += [left + e for e in piece.ends]
            position = end
        return Encoded(ids, starts, ends, text, plain)

    def _encode_piece(self, piece: str, *, as_text: bool, first: bool) -> Encoded:
        encoded = self._after_newline(piece, split_special=as_text, first=first)
        if not (as_text and self.control_ids & set(encoded.ids)):
            return encoded
        # Added tokens that are not special match even then, but never across two calls.
        head = self._after_newline(piece[:1], split_special=True, first=first)
        rest = self._after_newline(piece[1:], split_special=True, first=False)
        ids = head.ids + rest.ids
        if self.control_ids & set(ids):
            raise ValueError(
                f"{piece!r} stands in a message as text, but the tokenizer knows no other way to "
                "encode it than "
                "as the control token; remove it from the text or pass control_tokens='encode'"
            )
        starts = head.starts + [s + 1 for s in rest.starts]
        return Encoded(ids, starts, head.ends + [e + 1 for e in rest.ends], piece)

    def _after_newline(self, piece: str, *, split_special: bool, first: bool) -> Encoded:
        # SentencePiece writes a space in front of each text it is given; after a newline it does
        # not.
        if not first:
            newline = self._call(["\n"])[0]
            whole = self._call(["\n" + piece], split_special=split_special)[0]
            count = len(newline.ids)
            if whole.ids[:count] == newline.ids and (not whole.ends or whole.ends[count - 1] == 1):
                starts = [max(s - 1, 0) for s in whole.starts[count:]]
                return Encoded(
                    whole.ids[count:], starts, [e - 1 for e in whole.ends[count:]], piece
                )
        return self._call([piece], split_special=split_special)[0]

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids of the control tokens."""
        return frozenset(
            token_id
            for token_id, token in self.tokenizer.added_tokens_decoder.items()
            if token.content in self.control_tokens
        )

    def without_doubled_bos(self, ids: list[int]) -> list[int]:
        """Keep one of several BOS at the front."""
        if self.bos_id is None or len(ids) < 2 or ids[0] != self.bos_id:
            return ids
        first = 0
        while first + 1 < len(ids) and ids[first + 1] == self.bos_id:
            first += 1
        return ids[first:] if first else ids

    def text_ids(self, ids: list[int], *, bos: bool = True, eos: bool = True) -> list[int]:
        """Put the tokenizer's BOS before bare ids and an EOS after them, unless already there."""
        out = ids
        if bos and self.prefix:
            front = len(self.prefix)
            out = self.without_doubled_bos(ids if ids[:front] == self.prefix else self.prefix + ids)
        if eos and self.eos_id is not None and not self.ends_in_eos(out):
            out = [*out, self.eos_id]
        return out

    def spells_bos(self, ids: list[int]) -> bool:
        """Whether a text spells the BOS that the tokenizer puts in front of it."""
        return bool(self.prefix and ids) and ids[0] == self.bos_id == self.prefix[0]

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of a plain prompt: one BOS if the tokenizer uses it, no EOS."""
        return self.text_ids(self.encode(text).ids, eos=False)

    def ends_in_eos(self, ids: Sequence[int]) -> bool:
        """Whether the last token that is not white space is EOS."""
        last = self.last_spoken(ids)
        return last is not None and last == self.eos_id

    def ends_in_special(self, ids: Sequence[int]) -> bool:
        """Whether the last token that is not white space is EOS or an added token."""
        last = self.last_spoken(ids)
        return last is not None and (last == self.eos_id or last in self.added_ids)

    def last_spoken(self, ids: Sequence[int]) -> int | None:
        """The last token that is not white space."""
        return next((i for i in reversed(ids) if not self.is_blank(i)), None)

    def is_blank(self, token_id: int) -> bool:
        """Whether a token is white space alone."""
        known = self._blank.get(token_id)
        if known is None:
            special = token_id in self.added_ids or token_id == self.eos_id
            known = not special and not self.tokenizer.decode([token_id]).strip()
            self._blank[token_id] = known
        return known

    def mask(self, encoded: Encoded, spans: Sequence[Span]) -> list[int]:
        """One where a token overlaps one of the character ranges, else zero.

        An added token that begins before a range does not belong to it (some swallow the white
        space after them).
        """
        mask = [0] * len(encoded.ids)
        for start, end in spans:
            if end <= start:
                continue
            if self.has_offsets:
                first = bisect_right(encoded.ends, start)
                last = bisect_left(encoded.starts, end)
                if (
                    first < last
                    and encoded.starts[first] < start
                    and encoded.ids[first] in self.added_ids
                ):
                    first += 1
            else:
                first = self._tokens_before(encoded, start)
                last = self._tokens_before(encoded, end)
            mask[first:last] = [1] * (last - first)
        return mask

    def _tokens_before(self, encoded: Encoded, position: int) -> int:
        before = self.encode(
            encoded.text[:position], [p for p in encoded.plain if p[1] <= position]
        )
        return common_prefix_length(before.ids, encoded.ids)


_RECENT: deque[tuple[Any, Encoder]] = deque(maxlen=8)


def _cover(offsets: Sequence[Span]) -> tuple[list[int], list[int]]:
    # Byte-level tokenizers may trim the space off a token's offsets: a token reaches back to its
    # predecessor.
    starts, ends = [], []
    reached = 0
    for start, end in offsets:
        if end > reached:
            starts.append(reached)
            reached = end
        else:  # a further piece of one character, or an empty token
            starts.append(max(starts[-1] if starts else 0, min(start, reached)))
        ends.append(reached)
    return starts, ends


def any_of(words: Iterable[str]) -> str:
    """A pattern that matches the longest of some words, in time that their number does not slow.

    Example:
        >>> any_of(["ab", "abc", "ad"])
        'a(?:b(?:c)?|d)'
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(tree) or "(?!)"


def _branches(node: dict[str, Any]) -> str:
    found = [re.escape(c) + _branches(node[c]) for c in sorted(node) if c]
    if not found:
        return ""
    if len(found) == 1 and "" not in node:
        return found[0]
    return f"(?:{'|'.join(found)})" + ("?" if "" in node else "")


def _control_tokens(tokenizer: Any) -> frozenset[str]:
    template = getattr(tokenizer, "chat_template", None) or ""
    written = "\0".join(template.values()) if isinstance(template, dict) else template
    return frozenset(
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or (token.content in written and not token.content.isspace())
    )
