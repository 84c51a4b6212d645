"""From sampled token ids to text, reasoning and answer, without losing any of it.

Example:
    >>> from rl_decode import split_reasoning
    >>> split_reasoning("<think>2 + 2</think>4")
    Reasoned(reasoning='2 + 2', answer='4', state='complete')
"""

from __future__ import annotations

from rl_decode._version import __version__
from rl_decode.decode import Completion, decode_and_strip_padding, decode_completions
from rl_decode.formats import FORMATS, ReasoningFormat, detect_format
from rl_decode.reasoning import (
    Reasoned,
    Segment,
    opens_reasoning,
    reasoning_segments,
    render_reasoning,
    split_reasoning,
)
from rl_decode.stops import (
    collect_stop_ids,
    collect_stop_strings,
    cut_at_stop,
    ended_by_stop,
    ends_with_stop_string,
)

__all__ = [
    "FORMATS",
    "Completion",
    "Reasoned",
    "ReasoningFormat",
    "Segment",
    "__version__",
    "collect_stop_ids",
    "collect_stop_strings",
    "cut_at_stop",
    "decode_and_strip_padding",
    "decode_completions",
    "detect_format",
    "ended_by_stop",
    "ends_with_stop_string",
    "opens_reasoning",
    "reasoning_segments",
    "render_reasoning",
    "split_reasoning",
]
