"""A tokenised row as text in which the trained tokens stand out."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

GREEN, PLAIN = "\033[1;32m", "\033[0m"
OPENING, CLOSING = "⟦", "⟧"


def show_trained(
    tokenizer: Any,
    ids: Sequence[int],
    mask: Sequence[int],
    *,
    color: bool | None = None,
    limit: int = 2000,
) -> str:
    """The text of a row, trained tokens green or, without colour, in ⟦ ⟧.

    Args:
        tokenizer: decodes the ids.
        ids: token ids, ``T`` of them.
        mask: 1 on trained tokens.
        color: None: as standard output is a terminal and ``NO_COLOR`` is not set.
        limit: most characters of text; what is left out is counted.

    Example:
        >>> show_trained(tokenizer, ids, mask, color=False)  # doctest: +SKIP
        '<|user|>2+2=<|assistant|>⟦4<|end|>⟧'
    """
    if color is None:
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    left, right = (GREEN, PLAIN) if color else (OPENING, CLOSING)
    pieces: list[str] = []
    room = limit
    for trained, run in groupby(zip(mask, ids, strict=True), key=lambda pair: bool(pair[0])):
        text = tokenizer.decode([i for _, i in run], skip_special_tokens=False)
        shown = printable(text[: max(room, 0)])
        room -= len(text)
        if shown:
            pieces.append(f"{left}{shown}{right}" if trained else shown)
    if room < 0:
        pieces.append(f" … and {-room:,} characters")
    return "".join(pieces)


def printable(text: str) -> str:
    r"""Control characters spelled out, so that data cannot steer the terminal.

    Example:
        >>> printable("a\x1b[2J")
        'a\\x1b[2J'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
