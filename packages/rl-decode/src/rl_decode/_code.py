"""Which places of a text stand inside code, so that a marker spelled there is only text."""

from __future__ import annotations

import re
from bisect import bisect_left

# A line that opens or closes a fence. One that also holds later backticks is inline code.
_FENCE = re.compile(r"^[ \t]*(?:`{3,}[^`\n]*|~{3,}[^\n]*)$", re.MULTILINE)


class CodeMap:
    """Answers whether a marker at a place is enclosed by a code fence or inline code.

    Enclosed means: an odd number of fence lines (or, on the marker's own line, of backticks)
    stands before it in its region, and an odd number after it. The second half keeps a fence that
    reasoning left open, when its budget ran out, from swallowing the marker that ends it: the
    answer's own fences come in pairs.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._fences: list[int] = []
        self._ticks: list[int] = []
        if "`" in text:
            self._ticks = [match.start() for match in re.finditer("`", text)]
        if "~~~" in text or "```" in text:
            self._fences = [match.start() for match in _FENCE.finditer(text)]

    def encloses(self, start: int, end: int, region: int) -> bool:
        """Whether ``text[start:end]`` stands in code that begins at or after ``region``."""
        if not self._fences and not self._ticks:
            return False
        if self._odd(self._fences, region, start) and self._odd(self._fences, end, None):
            return True
        if not self._ticks:
            return False
        line_start = max(self._text.rfind("\n", region, start) + 1, region)
        line_end = self._text.find("\n", end)
        return self._odd(self._ticks, line_start, start) and self._odd(
            self._ticks, end, len(self._text) if line_end < 0 else line_end
        )

    @staticmethod
    def _odd(places: list[int], low: int, high: int | None) -> bool:
        last = len(places) if high is None else bisect_left(places, high)
        return (last - bisect_left(places, low)) % 2 == 1
