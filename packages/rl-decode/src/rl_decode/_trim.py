"""Rows without padding and without what follows their first stop: by position and id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import filterfalse
from typing import NamedTuple

from rl_decode.stops import CutReason, first_stop


class Trimmed(NamedTuple):
    """A row of ids, trimmed.

    Attributes:
        ids: the ids up to and including the first stop.
        reason: why they end there.
        shown: the ids without that stop and without special ids; None where these are the body.
    """

    ids: list[int]
    reason: CutReason
    shown: list[int] | None

    @property
    def body(self) -> list[int]:
        """The ids without the stop, made anew each time: lists that live cost time to collect."""
        return self.ids[:-1] if self.reason == "stop" else self.ids

    @property
    def clean(self) -> list[int]:
        """The ids whose text is shown."""
        return self.body if self.shown is None else self.shown


def trim_rows(
    rows: Sequence[list[int]],
    *,
    pad_id: int | None,
    stops: Sequence[int],
    dropped: frozenset[int],
    max_length: int | None,
) -> Iterator[Trimmed]:
    """Trim rows; a row that holds nothing to trim is looked at only once.

    Args:
        rows: rows of ids, padded or not.
        pad_id: the id that pads at either end; None where nothing does. If it is also a stop,
            padding is what follows the first stop.
        stops: ids that end a row.
        dropped: ids that are not shown.
        max_length: at most this many ids of a row are kept.
    """
    padding = None if pad_id in stops else pad_id
    marked = dropped.union(stops, () if pad_id is None else (pad_id,))
    ending = frozenset(stops)
    for row in rows:
        ended = bool(row) and row[-1] in ending
        short = max_length is None or len(row) <= max_length
        if short and marked.isdisjoint(row[:-1] if ended else row):
            reason: CutReason = "stop" if ended else "length" if row else "empty"
            yield Trimmed(row, reason, None)
            continue
        ids = without_padding(row, padding)[:max_length]
        end = first_stop(ids, stops)
        ids = ids if end is None else ids[: end + 1]
        reason = "stop" if end is not None else "length" if ids else "empty"
        shown = list(filterfalse(dropped.__contains__, ids[:-1] if reason == "stop" else ids))
        whole = len(shown) == len(ids) - (reason == "stop")
        yield Trimmed(ids, reason, None if whole else shown)


def without_padding(row: list[int], pad_id: int | None) -> list[int]:
    """Drop the runs of padding at both ends of a row."""
    start, end = 0, len(row)
    while end and row[end - 1] == pad_id:
        end -= 1
    while start < end and row[start] == pad_id:
        start += 1
    return row[start:end]


def without_left_padding(row: list[int], pad_id: int | None) -> list[int]:
    """Drop the run of padding at the front of a row, unless it is all there is."""
    if not row or row[0] != pad_id:
        return row
    start = next((place for place, i in enumerate(row) if i != pad_id), None)
    return row if start is None else row[start:]


def masked_rows(rows: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ids whose mask is not 0.

    Raises:
        ValueError: masks of another shape than the rows.
    """
    sizes, mask_sizes = [len(row) for row in rows], [len(mask) for mask in masks]
    if sizes != mask_sizes:
        raise ValueError(
            f"attention_mask has rows of lengths {mask_sizes[:8]}, the ids {sizes[:8]}; "
            "give a mask of the ids' shape"
        )
    return [
        [i for i, real in zip(row, mask, strict=True) if real]
        for row, mask in zip(rows, masks, strict=True)
    ]
