"""The tables of the documentation page, run row by row (case C5)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rl_decode import FORMATS, reasoning_segments, split_reasoning

PAGE = Path(__file__).parents[3] / "docs" / "packages" / "rl-decode.md"
HARMONY = {
    "analysis": "<|channel|>analysis<|message|>",
    "final": "<|channel|>final<|message|>",
    "commentary": "<|channel|>commentary<|message|>",
    "start": "<|start|>assistant",
    "end": "<|end|>",
    "return": "<|return|>",
    "call": "<|call|>",
}


def table(name: str) -> list[list[str]]:
    """The cells of the table below a ``<!-- name -->`` comment, head left out."""
    page = PAGE.read_text(encoding="utf-8")
    block = page.split(f"<!-- {name} -->\n")[1].split("\n\n")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()[2:]]
    return [[cell.strip().replace("\\|", "|") for cell in row] for row in rows]


def literal(cell: str) -> str:
    return ast.literal_eval(re.fullmatch(r"(`+)(.*)\1", cell)[2])


def placeholders(name: str) -> dict[str, str]:
    row = FORMATS[name]
    return {
        "open": row.open,
        "close": row.close,
        "OPEN": row.open.swapcase(),
        "CLOSE": row.close.swapcase(),
        "cut": row.close[:-1],
        "answer_open": row.answer_open,
        "answer_close": row.answer_close,
    }


TAGS = [name for name, row in FORMATS.items() if not row.channels]
CASES = [
    *[(name, row) for name in TAGS for row in table("shapes: tags")],
    *[
        (name, row)
        for name in TAGS
        if FORMATS[name].answer_open
        for row in table("shapes: answers")
    ],
    *[("harmony", row) for row in table("shapes: channels")],
]


@pytest.mark.parametrize(("name", "row"), CASES, ids=lambda v: v if isinstance(v, str) else v[0])
def test_c5_each_documented_shape_has_its_stated_outcome(name, row):
    _, text, opened, reasoning, answer, state = row
    fill = HARMONY if name == "harmony" else placeholders(name)
    text, reasoning, answer = (literal(cell).format(**fill) for cell in (text, reasoning, answer))
    choices = [name]
    if FORMATS[name].in_text and "no header" not in row[0]:
        choices.append("auto")
    for choice in choices:
        got = split_reasoning(text, format=choice, opened=opened == "yes")
        assert got == (reasoning, answer, state)
        parts = reasoning_segments(text, format=choice, opened=opened == "yes")
        assert "".join(part.text for part in parts) == text


def test_the_page_lists_every_shape_that_the_issue_names():
    shapes = " ".join(row[0] for row in table("shapes: tags"))
    for word in ("complete", "incomplete", "absent", "opened in the prompt", "several blocks"):
        assert word in shapes
    for word in ("stray closing marker", "nested", "other letter case", "fence", "inline code"):
        assert word in shapes


def test_the_page_lists_every_format_as_it_is():
    def cell(*markers: str) -> str:
        return " ".join(f"`{marker}`" for marker in markers if marker)

    assert table("formats") == [
        [
            f"`{row.name}`",
            cell(row.open),
            cell(row.close),
            cell(row.answer_open, row.answer_close),
            "yes" if row.in_text else "no",
            row.models,
        ]
        for row in FORMATS.values()
    ]
