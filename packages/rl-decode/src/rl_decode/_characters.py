"""Characters of which a row of ids holds only the first bytes."""

from __future__ import annotations

import codecs
import re

from rl_decode._vocabulary import Vocabulary

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's byte fallback


def whole_characters(vocabulary: Vocabulary, ids: list[int], text: str) -> str:
    """Hold back a last character of which the row has only the first bytes.

    A U+FFFD that the model wrote, or bytes that no further byte could mend, stay.

    Args:
        vocabulary: the tokenizer that decoded.
        ids: a row of ids.
        text: their text.
    """
    if not ids or not text.endswith(REPLACEMENT):
        return text
    run = ids[byte_run_start(vocabulary, ids, len(ids)) :]
    if run:
        # Such decoders give up the whole run of bytes for one bad end, so decode without it.
        count = _unfinished(bytes(int(str(vocabulary.piece(i))[1:-1], 16) for i in run))
        return vocabulary.decode(ids[:-count]) if count else text
    tail = b"".join(_byte_level(vocabulary.piece(i) or "") for i in ids[-4:])
    return text[:-1] if any(_unfinished(tail[-n:]) == n for n in (1, 2, 3)) else text


def byte_run_start(vocabulary: Vocabulary, ids: list[int], end: int) -> int:
    """Where the run of byte fallback pieces begins that stands before ``ids[end]``."""
    while end and _BYTE_PIECE.fullmatch(vocabulary.piece(ids[end - 1]) or ""):
        end -= 1
    return end


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
    others = (value for value in range(256) if value not in printable)
    table = {chr(value): value for value in printable}
    table.update({chr(256 + n): value for n, value in enumerate(others)})
    return table


_BYTES = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    return bytes(_BYTES[c] for c in piece) if all(c in _BYTES for c in piece) else b""
