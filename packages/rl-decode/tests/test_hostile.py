"""What was never meant to come in: an error that names the place, or a stated outcome."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_decode import (
    FORMATS,
    ReasoningFormat,
    cut_at_stop,
    decode_and_strip_padding,
    decode_completions,
    ends_with_stop_string,
    opens_reasoning,
    reasoning_segments,
    render_reasoning,
    split_reasoning,
)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, "inputs is None; give rows"),
        ("text", r"inputs is a str \('text'\)"),
        (3, "inputs is a int"),
        ({"input_ids": [[1]]}, "inputs is a mapping; give its 'input_ids'"),
        ([[1, torch.tensor([2, 3]), 4]], r"inputs\[0\]\[1\] is a list"),
        ([[1], None], r"inputs\[1\] is None; give a row"),
        ([[1], "text"], r"inputs\[1\] is a str"),
        ([[1, None]], r"inputs\[0\]\[1\] is None; token ids are integers"),
        ([[1, [2]]], r"inputs\[0\]\[1\] is a list"),
        ([[[1], [2]]], r"inputs\[0\]\[0\] is a list"),
        ([[1.0]], r"inputs\[0\]\[0\] is a float"),
        ([[True]], r"inputs\[0\]\[0\] is a bool"),
        ([[1, "2"]], r"inputs\[0\]\[1\] is a str"),
        ([1, None], r"inputs\[0\] is a int"),
        (torch.zeros(1, 2), r"inputs\[0\]\[0\] is a float"),
        (torch.zeros(1, 2, 2, dtype=torch.long), r"inputs\[0\]\[0\] is a list"),
        (np.array([["a"]]), r"inputs\[0\]\[0\] is a str"),
        (torch.tensor(3), "inputs is a int"),
    ],
)
def test_what_is_no_row_of_ids_is_refused_with_its_place(bpe, inputs, message):
    for decode in (decode_completions, decode_and_strip_padding):
        with pytest.raises(TypeError, match=message):
            decode(inputs, bpe)


@pytest.mark.parametrize("wrong", [-1, -100, 10**6, 2**70, -(2**70)])
def test_ids_outside_the_vocabulary_are_refused_or_marked(any_tokenizer, wrong):
    rows = [[5, 6], [5, 6, wrong, 7]]
    with pytest.raises(ValueError, match=f"row 1, position 2: id {wrong} is outside") as error:
        decode_completions(rows, any_tokenizer)
    assert ("labels" in str(error.value)) == (wrong == -100)
    got = decode_completions(rows, any_tokenizer, out_of_range="mark", stop_ids=[7])
    assert got[1].ids == rows[1]
    assert got[1].text.count("\ufffd") == 1
    (last,) = decode_completions([[5, wrong]], any_tokenizer, out_of_range="mark", stop_ids=())
    assert last.text.endswith("\ufffd")
    assert got[0] == decode_completions(rows[:1], any_tokenizer, stop_ids=[7])[0]


def test_ids_that_were_cut_away_are_not_looked_at(bpe):
    end = bpe.eos_token_id
    assert decode_completions([[5, end, -1]], bpe)[0].ids == [5, end]


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"format": "thinking_tags"}, ValueError, "format='thinking_tags' is not known"),
        ({"format": 3}, TypeError, "format is a int"),
        ({"opened": [True]}, ValueError, "opened has 1 values for 2 rows"),
        ({"stop_strings": [""]}, ValueError, "stop string ''"),
        ({"stop_strings": [3]}, ValueError, "stop string 3"),
        ({"attention_mask": [[1], [1, 1]]}, ValueError, "attention_mask has rows of lengths"),
        ({"attention_mask": [[1, 1]]}, ValueError, "attention_mask has rows of lengths"),
        ({"attention_mask": [[1, 1], None]}, TypeError, r"attention_mask\[1\] is None"),
        ({"attention_mask": [[1, 1], [1, 7]]}, TypeError, r"attention_mask\[1\] is a list"),
        ({"opened": None}, TypeError, r"opened\[0\] is None; give True or False"),
        ({"opened": [True, "no"]}, TypeError, r"opened\[1\] is a str"),
        ({"stop_ids": ["<eos>"]}, TypeError, r"stop_ids\[0\] is a str"),
        ({"stop_ids": 1.5}, TypeError, "stop_ids is a float"),
        ({"out_of_range": "ignore"}, ValueError, "out_of_range='ignore'"),
    ],
)
def test_wrong_options_say_what_to_choose(bpe, keywords, error, message):
    for decode in (decode_completions, decode_and_strip_padding):
        with pytest.raises(error, match=message):
            decode([[5, 6], [5, 6]], bpe, **keywords)


def test_wrong_options_of_one_function(bpe):
    with pytest.raises(ValueError, match="incomplete='drop'"):
        decode_and_strip_padding([[5]], bpe, incomplete="drop")
    with pytest.raises(ValueError, match="max_length=-1"):
        decode_completions([[5]], bpe, max_length=-1)
    with pytest.raises(ValueError, match="max_length=-1"):
        cut_at_stop([5], [6], max_length=-1)
    with pytest.raises(TypeError, match="tokenizer is None"):
        decode_completions([[5]], None)
    with pytest.raises(TypeError, match="tokenizer is 'gpt2'"):
        decode_completions([[5]], "gpt2")
    with pytest.raises(TypeError, match="tokenizer is a dict without a decode method"):
        decode_completions([[5]], {})
    with pytest.raises(TypeError, match="stop_strings is a int"):
        decode_completions([[5]], bpe, stop_strings=3)
    with pytest.raises(TypeError, match="attention_mask is a int"):
        decode_completions([[5]], bpe, attention_mask=1)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        ends_with_stop_string([5, -1], bpe, "a")
    with pytest.raises(ValueError, match="format='auto' names no format to write"):
        render_reasoning("r", "a", format="auto")
    with pytest.raises(ValueError, match="two different markers"):
        ReasoningFormat("same", "|", "|")
    for wrong in (None, 3, b"x", ["x"]):
        for function in (split_reasoning, reasoning_segments, opens_reasoning):
            with pytest.raises(TypeError, match="not a string"):
                function(wrong)


def test_lone_surrogates_and_control_characters_are_text():
    odd = "\ud800\x00\x1b\u202e\udfff"
    assert split_reasoning(f"<think>{odd}x</think>y{odd}") == (f"{odd}x", f"y{odd}", "complete")
    assert split_reasoning(odd) == ("", odd, "absent")


@pytest.mark.parametrize("piece", ["x", " ", "\n", "<", "`", "<|channel|>a", "</think>"])
def test_ten_megabytes_are_split(piece):
    text = "<think>" + piece * (10_000_000 // len(piece))
    assert sum(len(part.text) for part in reasoning_segments(text)) == len(text)


@pytest.mark.parametrize("name", ["auto", "think", "cohere", "harmony"])
@pytest.mark.parametrize(
    "text",
    [
        "<think></think>" * 20_000,
        "`</think>` " * 20_000,
        "```\n</think>\n" * 20_000,
        "```" + "`</think>" * 20_000,
        "<|START_RESPONSE|>" * 20_000,
        "<|start|>" * 20_000,
        "<|channel|>" + "a" * 300_000,
        "<|channel|>" + " " * 300_000,
        ("<|start|>" + "a" * 1_000) * 300,
        "<|channel|>analysis<|message|><|end|>" * 10_000,
        "<|" * 100_000,
        " " * 300_000 + "```",
    ],
    ids=lambda text: text[:24].strip(),
)
def test_splitting_is_linear_in_hostile_texts(text, name):
    """Quadratic work here would be minutes."""
    parts = reasoning_segments(text, format=name)
    assert sum(len(part.text) for part in parts) == len(text)
    opens_reasoning(text, format=name)


def test_markers_at_the_edges_of_every_format():
    for row in FORMATS.values():
        for text in (*row.markers, *row.tokens, *(m * 2 for m in row.markers)):
            for opened in (True, False):
                parts = reasoning_segments(text, format=row, opened=opened)
                assert "".join(part.text for part in parts) == text


def test_no_rows_and_rows_of_nothing(bpe):
    for nothing in ([], (), np.zeros((0, 4), dtype=int), torch.zeros(0, 4, dtype=torch.long)):
        assert decode_completions(nothing, bpe) == []
        assert decode_and_strip_padding(nothing, bpe) == []
    assert [c.finish_reason for c in decode_completions([[], []], bpe)] == ["empty"] * 2
    assert decode_completions(torch.zeros(2, 0, dtype=torch.long), bpe)[1].text == ""
    assert decode_completions([[], []], bpe, opened=True)[0].state == "incomplete"
