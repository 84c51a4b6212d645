"""Properties: nothing is lost, and writing and splitting are inverse."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_decode import (
    FORMATS,
    decode_and_strip_padding,
    decode_completions,
    opens_reasoning,
    reasoning_segments,
    render_reasoning,
    split_reasoning,
)

settings.register_profile(
    "rl-decode",
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("rl-decode")

MARKERS = sorted({m for row in FORMATS.values() for m in (*row.markers, *row.tokens)})
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
# Pieces that make collisions likely: every marker, halves of them, code, case, white space.
PIECES = [
    *MARKERS,
    *(m[: len(m) // 2] for m in MARKERS),
    "```",
    "```py",
    "`",
    "~~~",
    "\n",
    " ",
    "x",
]
TRICKY = st.lists(st.one_of(st.sampled_from(PIECES), TEXT), max_size=12).map("".join)
NAMES = st.sampled_from(sorted(FORMATS))


@given(text=TRICKY, name=st.one_of(st.just("auto"), st.none(), NAMES), opened=st.booleans())
def test_segments_are_an_exact_partition_of_any_text(text, name, opened):
    parts = reasoning_segments(text, format=name, opened=opened)
    assert "".join(part.text for part in parts) == text
    assert all(part.text for part in parts) or parts == [("answer", "")] or not text
    assert sum(part.kind == "answer" for part in parts) <= 1


@given(text=TRICKY, name=st.one_of(st.just("auto"), st.none(), NAMES), opened=st.booleans())
def test_a_split_adds_nothing_and_keeps_to_its_states(text, name, opened):
    reasoning, answer, state = split_reasoning(text, format=name, opened=opened)
    assert answer in text
    assert all(thought in text for thought in reasoning.split("\n\n"))
    if state == "absent":
        assert reasoning == ""
        assert not opened
    if state == "incomplete":
        assert answer == ""
    if opened:
        assert state != "absent"


@given(
    pieces=st.lists(st.sampled_from(["O", "C", "a", " b", "\n", "  ", "<", "think>"]), max_size=10),
    name=NAMES.filter(lambda name: not FORMATS[name].channels and not FORMATS[name].answer_open),
    opened=st.booleans(),
)
def test_c5_the_split_agrees_with_its_rule_said_from_the_end(pieces, name, opened):
    """The rule read backwards: find the last closing marker, then look for an opening one."""
    row = FORMATS[name]
    text = "".join({"O": row.open, "C": row.close}.get(piece, piece) for piece in pieces)
    if any(text.count(m) != pieces.count(key) for key, m in (("O", row.open), ("C", row.close))):
        return  # pieces that happened to spell a marker
    after = text.rpartition(row.close)[2]
    closed = row.close in text
    if row.open in after or (opened and not closed):
        expected = "incomplete"
    else:
        expected = "complete" if closed else "absent"
    _, answer, state = split_reasoning(text, format=name, opened=opened)
    assert state == expected
    if state == "complete":
        assert answer.lstrip() == after.lstrip()
    elif state == "absent":
        assert answer == text


def own_parts(name: str) -> st.SearchStrategy[str]:
    """Texts that a format can hold: none of its markers, no white space around, no code."""
    row = FORMATS[name]
    taken = {*row.markers, *row.tokens, "`", "~"}

    def free(text: str) -> bool:
        # Markers may not arise where a part touches the white space or markers beside it either.
        return not any(m.strip() in text for m in taken) and not text.endswith(("<", "[", "◁"))

    return TRICKY.map(str.strip).filter(free)


@given(data=st.data(), name=NAMES)
def test_render_and_split_are_inverse(data, name):
    reasoning, answer = data.draw(own_parts(name)), data.draw(own_parts(name))
    text = render_reasoning(reasoning, answer, format=name)
    assert split_reasoning(text, format=name) == (reasoning, answer, "complete")
    opener = FORMATS[name].open
    rest = text.removeprefix(opener)
    assert split_reasoning(rest, format=name, opened=True) == (reasoning, answer, "complete")
    assert opens_reasoning("<|im_start|>assistant\n" + opener, format=name)


@given(data=st.data(), name=NAMES)
def test_render_and_split_are_inverse_with_closed_code_around_markers(data, name):
    if FORMATS[name].channels:
        return  # in messages a marker is a token of its own, code or not
    row = FORMATS[name]
    inside = data.draw(st.sampled_from([row.open, row.close, f"{row.open}x{row.close}"]))
    code = data.draw(
        st.sampled_from([f"`{inside}`", f"```\n{inside}\n```", f"~~~py\n{inside}\n~~~"])
    )
    reasoning = data.draw(st.sampled_from(["r", f"r\n{code}", f"{code}\nr"]))
    answer = data.draw(st.sampled_from(["a", f"a\n{code}", f"{code}\na"]))
    text = render_reasoning(reasoning, answer, format=name)
    assert split_reasoning(text, format=name) == (reasoning, answer, "complete")


@pytest.mark.parametrize("name", ["bpe", "plain_bpe", "legacy_sp"])
@given(text=TEXT)
def test_decoding_what_was_encoded_keeps_the_text(name, request, text):
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    (got,) = decode_completions([[*ids, tokenizer.eos_token_id]], tokenizer, format=None)
    assert got.text == got.answer == text
    (got,) = decode_completions([ids], tokenizer, format=None)
    assert got.text == text


@pytest.mark.parametrize("name", ["bpe", "plain_bpe", "sp", "legacy_sp", "bert"])
@given(data=st.data())
def test_any_ids_decode_as_the_tokenizer_does(name, request, data):
    tokenizer = request.getfixturevalue(name)
    rows = data.draw(st.lists(st.lists(st.integers(0, len(tokenizer) - 1), max_size=8), max_size=4))
    if rows and not any(rows):
        rows = []
    stops = {tokenizer.eos_token_id}
    for row, got in zip(
        rows, decode_completions(rows, tokenizer, stop_ids=stops, format=None), strict=True
    ):
        spelled = tokenizer.decode(got.ids, clean_up_tokenization_spaces=False)
        assert got.raw_text == spelled
        # A row cut at its length may hold back what its last three ids only begin.
        held = 3 if got.finish_reason == "length" else 0
        assert got.text in [
            tokenizer.decode(
                got.ids[: len(got.ids) - n],
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            ).removesuffix("\ufffd" if held else "")
            for n in range(held + 1)
        ] or got.text == tokenizer.decode(
            got.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        unpadded = [i for i in row if i != tokenizer.pad_token_id or i in stops]
        assert [i for i in got.ids if i != tokenizer.pad_token_id or i in stops] == unpadded[
            : len([i for i in got.ids if i != tokenizer.pad_token_id or i in stops])
        ]


@pytest.mark.parametrize("name", ["bpe", "sp", "legacy_sp", "bert"])
@given(data=st.data())
def test_padding_on_either_side_changes_nothing(name, request, data):
    tokenizer = request.getfixturevalue(name)
    pad = tokenizer.pad_token_id
    sampled = st.integers(0, len(tokenizer) - 1).filter(lambda i: i != pad)
    row = data.draw(st.lists(sampled, min_size=1, max_size=8))
    left, right = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    padded = [[pad] * left + row + [pad] * right]
    mask = [[0] * left + [1] * len(row) + [0] * right]
    assert decode_completions(padded, tokenizer) == decode_completions([row], tokenizer)
    assert decode_completions(padded, tokenizer, attention_mask=mask) == decode_completions(
        [row], tokenizer
    )
    assert decode_and_strip_padding(padded, tokenizer) == decode_and_strip_padding([row], tokenizer)


@pytest.mark.parametrize("name", ["bpe", "sp", "legacy_sp", "bert"])
@given(data=st.data(), stop=st.text("abo ,four", min_size=1, max_size=3))
def test_a_stop_string_never_stays_and_never_takes_more_than_it_must(name, request, data, stop):
    tokenizer = request.getfixturevalue(name)
    words = data.draw(
        st.lists(st.sampled_from(["four", "two", ", and", " so", "is", " "]), max_size=9)
    )
    ids = tokenizer.encode("".join(words), add_special_tokens=False)
    (got,) = decode_completions([ids], tokenizer, stop_strings=stop, format=None)
    whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert got.text == whole.partition(stop)[0]
    assert (got.finish_reason == "stop_string") == (stop in whole)
    assert got.ids == ids[: len(got.ids)]
