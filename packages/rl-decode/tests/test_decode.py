"""Ids to completions on real tokenizers: cases B9, B10, C1 to C4, C6."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_decode import (
    FORMATS,
    Completion,
    collect_stop_ids,
    decode_and_strip_padding,
    decode_completions,
    render_reasoning,
    split_reasoning,
)


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def ids_of(tokenizer, *tokens: str) -> list[int]:
    return tokenizer.convert_tokens_to_ids(list(tokens))


def test_a_completion_carries_what_rewards_need(bpe):
    ids = encode(bpe, "<think>2 + 2</think>four<|im_end|>")
    (got,) = decode_completions([[*ids, bpe.pad_token_id, bpe.pad_token_id]], bpe)
    assert got == Completion(
        ids=ids,
        raw_text="<think>2 + 2</think>four<|im_end|>",
        text="<think>2 + 2</think>four",
        reasoning="2 + 2",
        answer="four",
        state="complete",
        finish_reason="stop",
    )
    assert got.ended


def test_the_three_reasoning_states(bpe):
    texts = ["<think>r</think>four", "<think>r", "four"]
    rows = [encode(bpe, text) for text in texts]
    states = [c.state for c in decode_completions(rows, bpe)]
    assert states == ["complete", "incomplete", "absent"]
    assert decode_and_strip_padding(rows, bpe) == ["four", "", "four"]
    assert decode_and_strip_padding(rows, bpe, incomplete="keep") == ["four", "<think>r", "four"]
    with pytest.raises(ValueError, match="row 1 opens a block"):
        decode_and_strip_padding(rows, bpe, incomplete="error")


def test_c1_a_prompt_that_ends_in_an_opened_block(bpe):
    rows = [encode(bpe, "x</think>y"), encode(bpe, "x"), encode(bpe, "x")]
    got = decode_completions(rows, bpe, opened=[True, True, False])
    assert [(c.reasoning, c.answer, c.state) for c in got] == [
        ("x", "y", "complete"),
        ("x", "", "incomplete"),
        ("", "x", "absent"),
    ]
    assert decode_and_strip_padding(rows[:2], bpe, opened=True) == ["y", ""]


def test_c2_nothing_after_the_first_stop_is_shown(bpe):
    eos, turn = ids_of(bpe, "<|endoftext|>", "<|im_end|>")
    a, b = encode(bpe, "first"), encode(bpe, "second")
    got = decode_completions([[*a, turn, *b, eos], [*a, eos, *b, turn], [*a, *b]], bpe)
    assert [c.ids for c in got] == [[*a, turn], [*a, eos], [*a, *b]]
    assert [c.text for c in got] == ["first", "first", "firstsecond"]
    assert [c.finish_reason for c in got] == ["stop", "stop", "length"]


def test_c2_a_stop_id_that_is_an_ordinary_token_is_not_shown_either(bpe):
    (stop,) = encode(bpe, ".")
    (got,) = decode_completions([[*encode(bpe, "a b"), stop, 5]], bpe, stop_ids=[stop])
    assert (got.text, got.raw_text, got.finish_reason) == ("a b", "a b.", "stop")


def test_c3_a_special_token_with_a_meaning_is_in_ids_and_raw_text(bpe):
    (tool,) = ids_of(bpe, "<|tool|>")
    text = '<|tool|>{"city": "x"}<|tool|> done<|im_end|>'
    (got,) = decode_completions([encode(bpe, text)], bpe)
    assert got.ids.count(tool) == 2
    assert got.raw_text == text
    assert got.text == got.answer == '{"city": "x"} done'


def test_c4_text_that_spells_special_tokens_is_kept(bpe):
    pieces = [encode(bpe, part) for part in ("<|", "pad", "|>", " <|", "im_end", "|>")]
    ids = [i for piece in pieces for i in piece]
    assert not set(ids) & set(bpe.all_special_ids)
    pads = [bpe.pad_token_id] * 3
    (got,) = decode_completions([[*ids, *pads]], bpe)
    assert got.text == got.raw_text == "<|pad|> <|im_end|>"
    assert decode_and_strip_padding([[*pads, *ids, *pads]], bpe) == ["<|pad|> <|im_end|>"]


def test_b9_empty_and_padded_completions(bpe, plain_bpe):
    pad = bpe.pad_token_id
    got = decode_completions([[], [5, pad], [pad, pad]], bpe)
    assert [c.finish_reason for c in got] == ["empty", "length", "empty"]
    assert [c.ids for c in got] == [[], [5], []]
    assert not any(c.ended for c in got)
    both = plain_bpe.eos_token_id  # padding and end are one id: only a mask can tell
    assert both == plain_bpe.pad_token_id
    rows, mask = [[5, both, both], [5, both, both]], [[1, 0, 0], [1, 1, 0]]
    got = decode_completions(rows, plain_bpe, attention_mask=torch.tensor(mask))
    assert [(c.ids, c.finish_reason) for c in got] == [([5], "length"), ([5, both], "stop")]


def test_b1_the_real_end_token_stays_where_it_is_also_the_padding(plain_bpe):
    end = plain_bpe.eos_token_id
    (got,) = decode_completions([[5, 6, end, end, end]], plain_bpe)
    assert (got.ids, got.finish_reason) == ([5, 6, end], "stop")


def test_b10_left_padded_prompts_hold_no_padding(bpe, plain_bpe):
    for tokenizer in (bpe, plain_bpe):
        ids = encode(tokenizer, "Two plus two?")
        rows = [[tokenizer.pad_token_id] * 4 + ids, ids]
        shown = decode_and_strip_padding(rows, tokenizer, stop_ids=(), format=None)
        assert shown == ["Two plus two?"] * 2
        assert decode_and_strip_padding(rows, tokenizer) == ["Two plus two?"] * 2
    chat = encode(bpe, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    rows = [[bpe.pad_token_id, *chat]]
    assert decode_and_strip_padding(rows, bpe, stop_ids=(), format=None) == [
        "user\nhi\nassistant\n"
    ]
    mask = [[0] + [1] * len(chat)]
    assert decode_and_strip_padding(rows, bpe, stop_ids=(), format=None, attention_mask=mask) == [
        "user\nhi\nassistant\n"
    ]


def test_c6_markers_that_are_special_tokens_survive_until_the_split(with_tokens):
    for name, row in FORMATS.items():
        if not row.tokens:
            continue
        tokenizer = with_tokens(*row.tokens)
        text = render_reasoning("two plus two", "four", format=name)
        ids = [*encode(tokenizer, text), tokenizer.eos_token_id]
        assert set(ids) & set(ids_of(tokenizer, *row.tokens))
        assert "four" in tokenizer.decode(ids, skip_special_tokens=True)
        (got,) = decode_completions([ids], tokenizer)
        assert (got.reasoning, got.answer, got.state) == ("two plus two", "four", "complete"), name
        assert decode_and_strip_padding([ids], tokenizer, format=name) == ["four"]


def test_c6_sentencepiece_markers_that_are_special_tokens(sp):
    ids = [
        *ids_of(sp, "[THINK]"),
        *encode(sp, "two plus two"),
        *ids_of(sp, "[/THINK]"),
        *encode(sp, "four"),
        sp.eos_token_id,
    ]
    (got,) = decode_completions([ids], sp)
    assert (got.reasoning, got.answer, got.state) == ("two plus two", "four", "complete")
    assert got.raw_text == sp.decode(ids, skip_special_tokens=False)


def test_text_alone_decides_the_split(bpe, sp):
    for tokenizer in (bpe, sp):
        rows = [encode(tokenizer, render_reasoning("r", "a", format=f)) for f in FORMATS]
        for got in decode_completions(rows, tokenizer, format="think"):
            split = split_reasoning(got.text, format="think")
            assert split == (got.reasoning, got.answer, got.state)


def test_a_tokenizer_without_markers_leaves_the_choice_to_each_text(plain_bpe):
    rows = [
        encode(plain_bpe, render_reasoning("r", "a", format=name))
        for name, row in FORMATS.items()
        if row.in_text
    ]
    got = decode_completions(rows, plain_bpe)
    assert {(c.reasoning, c.answer, c.state) for c in got} == {("r", "a", "complete")}
    assert {c.answer for c in decode_completions(rows, plain_bpe, format=None)} == {
        c.text for c in got
    }


def test_lists_arrays_and_tensors_give_the_same(bpe):
    pad = bpe.pad_token_id
    rows = [encode(bpe, "four<|im_end|>"), encode(bpe, "so is 2 + 2.<|im_end|>")]
    width = max(map(len, rows))
    full = [row + [pad] * (width - len(row)) for row in rows]
    expected = decode_completions(rows, bpe)
    for same in (
        full,
        tuple(map(tuple, full)),
        np.array(full, dtype=np.int32),
        torch.tensor(full),
        [torch.tensor(row) for row in full],
        [np.array(row, dtype=np.uint16) for row in rows],
        [[np.int64(i) for i in row] for row in rows],
        (row for row in rows),
    ):
        assert decode_completions(same, bpe) == expected
    assert decode_completions(torch.tensor(rows[0]), bpe) == expected[:1]
    assert decode_completions(rows[0], bpe) == expected[:1]
    assert decode_completions([], bpe) == []
    stop = expected[0].ids[-1]
    for stops in (stop, [stop], {stop}, torch.tensor(stop), torch.tensor([stop]), np.int64(stop)):
        assert decode_completions(rows, bpe, stop_ids=stops) == expected
    real = torch.tensor(full) != pad
    for mask in (real, real.long(), real.numpy(), real.tolist(), list(real)):
        assert decode_completions(full, bpe, attention_mask=mask) == expected
    for opened in (torch.tensor([True, False]), np.array([True, False]), (True, False)):
        states = [c.state for c in decode_completions(rows, bpe, opened=opened)]
        assert states == ["incomplete", "absent"]
    assert all(type(i) is int for c in decode_completions(np.array(full), bpe) for i in c.ids)


def test_the_length_limit_cuts_ids_and_text(bpe):
    ids = encode(bpe, "The quick brown fox<|im_end|>")
    (got,) = decode_completions([ids], bpe, max_length=2)
    assert (got.ids, got.text, got.finish_reason) == (ids[:2], bpe.decode(ids[:2]), "length")


def test_raw_text_is_the_tokenizers_own_spelling_of_the_ids(any_tokenizer):
    stop = any_tokenizer.eos_token
    texts = ["", "a b", "so is 2 + 2.", "naïve café"]
    rows = [encode(any_tokenizer, text) + ids_of(any_tokenizer, stop) for text in texts]
    rows += [row[:-1] for row in rows[1:]]
    for got in decode_completions(rows, any_tokenizer):
        assert got.raw_text == any_tokenizer.decode(
            got.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def test_clean_text_is_what_the_tokenizer_gives_without_special_tokens(any_tokenizer):
    texts = ["a b", "so is 2 + 2.", "don 't , naïve café ?"]
    rows = [[*encode(any_tokenizer, text), any_tokenizer.eos_token_id] for text in texts]
    for row, got in zip(rows, decode_completions(rows, any_tokenizer), strict=True):
        assert got.text == any_tokenizer.decode(
            row, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@pytest.mark.parametrize("name", ["bpe", "sp", "legacy_sp"])
def test_a_character_cut_in_its_middle_is_held_back(name, request):
    tokenizer = request.getfixturevalue(name)
    text = "ab €🙂漢字🙂"
    ids = encode(tokenizer, text)
    assert len(ids) > len(text)  # some characters are several tokens
    for count in range(1, len(ids) + 1):
        (got,) = decode_completions([ids[:count]], tokenizer)
        assert text.startswith(got.text), (count, got.text)
        assert "\ufffd" not in got.text
        assert got.raw_text == tokenizer.decode(ids[:count])
    assert got.text == text


@pytest.mark.parametrize("name", ["bpe", "sp"])
def test_a_replacement_character_that_the_model_wrote_stays(name, request):
    tokenizer = request.getfixturevalue(name)
    (got,) = decode_completions([encode(tokenizer, "ab\ufffd")], tokenizer)
    assert got.text == "ab\ufffd"


def test_bytes_that_no_further_byte_could_mend_stay_marked(bpe, sp):
    (lead,) = ids_of(bpe, "â")  # the byte E2 in GPT-2's alphabet
    ended = [*encode(bpe, "ab"), lead, *ids_of(bpe, "<|im_end|>")]
    assert decode_completions([ended], bpe)[0].text == "ab\ufffd"  # the model ended it there
    (stray,) = ids_of(bpe, "Ĥ")  # the byte 84, which begins no character
    assert decode_completions([[*encode(bpe, "ab"), stray]], bpe)[0].text == "ab\ufffd"
    (stray,) = ids_of(sp, "<0x84>")
    assert decode_completions([[*encode(sp, "ab"), stray]], sp)[0].text == "ab\ufffd"


@pytest.mark.parametrize("name", ["bpe", "sp", "legacy_sp"])
def test_spaces_survive_sentencepiece_and_clean_up_rules(name, request):
    tokenizer = request.getfixturevalue(name)
    for text in ("word", "a , b . c ?", "do n't", "end ", "\n\nx", "x  y", " word"):
        ids = encode(tokenizer, text)
        if name == "sp" and text.startswith(" "):
            assert ids == encode(tokenizer, text[1:])  # this tokenizer cannot tell the two apart
            text = text[1:]
        pads = [tokenizer.pad_token_id] * 2
        assert decode_completions([[*ids, *pads]], tokenizer)[0].text == text
        assert decode_and_strip_padding([[*pads, *ids]], tokenizer) == [text]


def test_the_stops_are_collected_when_none_are_given(bpe):
    row = encode(bpe, "a<|im_end|>b")
    assert decode_completions([row], bpe) == decode_completions(
        [row], bpe, stop_ids=collect_stop_ids(bpe)
    )
    assert decode_completions([row], bpe, stop_ids=())[0].text == "ab"


def test_ids_of_added_tokens_above_a_gap_are_in_the_vocabulary():
    class Gapped:
        def __init__(self):
            self.added_tokens_decoder = {9: "<call>"}
            self.all_special_ids = []

        def __len__(self):
            return 3

        def decode(self, ids):
            return "".join("<call>" if i == 9 else "abc"[i] for i in ids)

    (got,) = decode_completions([[0, 9]], Gapped(), stop_ids=())
    assert got.raw_text == "a<call>"
    with pytest.raises(ValueError, match="id 10 is outside the tokenizer's 10 ids"):
        decode_completions([[0, 10]], Gapped(), stop_ids=())


def test_bare_tokenizers_and_anything_that_decodes(bpe):
    backend = bpe.backend_tokenizer
    ids = encode(bpe, "<think>r</think>four")
    turn = ids_of(bpe, "<|im_end|>")
    (got,) = decode_completions([ids + turn], backend, stop_ids=turn)
    assert (got.answer, got.raw_text) == ("four", "<think>r</think>four<|im_end|>")

    class Letters:
        def decode(self, ids):
            return "".join(chr(97 + i) for i in ids)

    (got,) = decode_completions([[0, 1, 2]], Letters(), stop_ids=[2])
    assert (got.text, got.raw_text, got.finish_reason) == ("ab", "abc", "stop")
