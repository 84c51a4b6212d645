"""Texts that end a completion, at any place within its tokens."""

from __future__ import annotations

import pytest

from rl_decode import decode_completions, ends_with_stop_string


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def ids_of(tokenizer, *tokens: str) -> list[int]:
    return tokenizer.convert_tokens_to_ids(list(tokens))


@pytest.mark.parametrize("stop", ["is four", "o is", ", and so", "d s"])
def test_a_stop_string_split_over_tokens(any_tokenizer, stop):
    text = "Two plus two is four , and so is 2 + 2"
    ids = encode(any_tokenizer, text)
    (got,) = decode_completions([ids], any_tokenizer, stop_strings=[stop, "not there"])
    whole = any_tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if stop not in whole:
        assert (got.text, got.finish_reason) == (whole, "length")
        return
    assert got.finish_reason == "stop_string"
    assert got.text == whole[: whole.index(stop)]
    assert stop in got.raw_text
    assert got.ids == ids[: len(got.ids)]
    assert stop not in any_tokenizer.decode(got.ids[:-1], clean_up_tokenization_spaces=False)


def test_the_stop_string_that_is_complete_first_ends_the_row(bpe):
    ids = encode(bpe, "ab\n\nUser: next question")
    (got,) = decode_completions([ids], bpe, stop_strings=["next question", "User:", "\n\nUser:"])
    assert (got.text, got.finish_reason) == ("ab", "stop_string")


def test_a_stop_string_before_and_after_special_tokens(bpe):
    tool, end = "<|tool|>", "<|im_end|>"
    rows = [encode(bpe, f"{tool}a{tool}b STOP c{end}"), encode(bpe, f"a{tool}b{end} STOP")]
    got = decode_completions(rows, bpe, stop_strings="STOP")
    assert [(c.text, c.finish_reason) for c in got] == [("ab ", "stop_string"), ("ab", "stop")]
    assert got[0].raw_text == f"{tool}a{tool}b STOP"
    (got,) = decode_completions([encode(bpe, f"a{tool}b STOP c")], bpe, stop_strings=f"{tool}b S")
    assert (got.text, got.finish_reason) == ("a", "stop_string")


def test_a_stop_that_is_the_closing_marker_closes_the_reasoning(bpe, plain_bpe):
    (close,) = ids_of(bpe, "</think>")
    rows = [encode(bpe, "<think>r</think>a"), encode(bpe, "<think>r")]
    got = decode_completions(rows, bpe, stop_ids=[close])
    assert [(c.text, c.state, c.finish_reason) for c in got] == [
        ("<think>r</think>", "complete", "stop"),
        ("<think>r", "incomplete", "length"),
    ]
    for tokenizer in (bpe, plain_bpe):
        ids = encode(tokenizer, "<think>r</think>a")
        (got,) = decode_completions([ids], tokenizer, stop_strings="</think>")
        assert (got.reasoning, got.answer, got.state) == ("r", "", "complete")
        assert got.finish_reason == "stop_string"
        (got,) = decode_completions([ids], tokenizer, stop_strings="</think>", format=None)
        assert got.text == "<think>r"


def test_a_stop_string_in_a_run_of_bytes_is_found_at_once(sp, legacy_sp):
    """One unfinished character makes such decoders give up the whole run before it."""
    for tokenizer in (sp, legacy_sp):
        ids = encode(tokenizer, "ab漢字漢字漢字")
        (got,) = decode_completions([ids], tokenizer, stop_strings="字")
        assert (got.text, got.raw_text) == ("ab漢", "ab漢字")
        seen = [ends_with_stop_string(ids[:n], tokenizer, "字") for n in range(len(ids) + 1)]
        assert seen.index("字") == len(got.ids)
        assert seen.count("字") == 3


def test_a_stop_string_that_takes_in_special_tokens_leaves_the_text_before_it(bpe):
    ids = encode(bpe, "ab<|tool|>cd")
    for stop, text in (("b<|to", "a"), ("<|tool|>c", "ab"), ("l|>c", "ab"), ("d", "abc")):
        (got,) = decode_completions([ids], bpe, stop_strings=stop)
        assert (got.text, got.finish_reason) == (text, "stop_string")


def test_a_stop_string_inside_the_reasoning_leaves_it_incomplete(bpe):
    ids = encode(bpe, "<think>a\n\nb</think>c")
    (got,) = decode_completions([ids], bpe, stop_strings="\n\n")
    assert (got.reasoning, got.answer, got.state) == ("a", "", "incomplete")
    assert got.finish_reason == "stop_string"
