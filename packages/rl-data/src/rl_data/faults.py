"""Errors that name the row, and faults of single rows put in words."""

from __future__ import annotations


class RowError(ValueError):
    """A row that cannot be prepared; says which row and why."""


def encoding_fault(text: str, error: Exception) -> str:
    """Why a text cannot be encoded; names lone surrogates, the usual cause."""
    for place, character in enumerate(text):
        if "\ud800" <= character <= "\udfff":
            return (
                f"the text holds half of a surrogate pair, {character!r}, at character {place}: no "
                "UTF-8 can spell it; "
                "mend the text, e.g. with text.encode('utf-16', 'surrogatepass').decode('utf-16', "
                "'replace')"
            )
    return one_line(error)


def one_line(error: Exception) -> str:
    """An exception as one line, its type named where the message alone would not tell."""
    words = " ".join(str(error).split())
    return words if isinstance(error, ValueError) and words else f"{type(error).__name__}: {words}"
