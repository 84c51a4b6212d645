"""Formats, prompt extraction (D3), templates as text, prompts for generation (C1)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_data import (
    apply_chat_template,
    detect_format,
    extract_prompt,
    is_conversational,
    maybe_apply_chat_template,
    maybe_convert_to_chatml,
    maybe_extract_prompt,
    tokenize_prompt,
)

USER = [{"role": "user", "content": "hi"}]
A = [{"role": "assistant", "content": "a"}]
B = [{"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Paris ", "London", ""),
        ("The sky", "The sky is blue", "The sky"),
        ("same", "same", "same"),
        ("", "", ""),
        ("", "a", ""),
        (" a", " b", ""),
        ("The sky is blue", "The sky is green", "The sky is"),
        ([*USER, *A], [*USER, *B], USER),
        (A, B, []),
        ([*USER, *A], [*USER, *A], [*USER, *A]),
        (USER, [*USER, *A], USER),
    ],
)
def test_d3_extracting_the_prompt(chosen, rejected, prompt):
    found = extract_prompt({"chosen": chosen, "rejected": rejected})
    assert found["prompt"] == prompt
    assert found["prompt"] + found["chosen"] == chosen
    assert found["prompt"] + found["rejected"] == rejected


@given(st.text(alphabet="ab "), st.text(alphabet="ab "))
def test_d3_nothing_is_lost_and_the_rest_begins_differently(chosen, rejected):
    found = extract_prompt({"chosen": chosen, "rejected": rejected})
    assert found["prompt"] + found["chosen"] == chosen
    assert found["prompt"] + found["rejected"] == rejected
    left, right = found["chosen"].removeprefix(" "), found["rejected"].removeprefix(" ")
    if chosen != rejected and left and right:
        assert left[0] != right[0] or (found["chosen"][0] != found["rejected"][0])


def test_d3_sides_of_different_kinds_are_refused():
    with pytest.raises(ValueError, match="chosen is str and rejected is list"):
        extract_prompt({"chosen": "a", "rejected": A})
    with pytest.raises(ValueError, match="chosen is NoneType"):
        extract_prompt({"chosen": None, "rejected": "a"})


def test_maybe_extract_prompt_leaves_explicit_prompts_and_other_rows_alone():
    assert maybe_extract_prompt({"text": "a"}) == {"text": "a"}
    row = {"prompt": "x", "chosen": "a", "rejected": "b"}
    assert maybe_extract_prompt(row) == row
    implicit = {"chosen": [*USER, *A], "rejected": [*USER, *B], "id": 3}
    assert maybe_extract_prompt(implicit) == {"prompt": USER, "chosen": A, "rejected": B, "id": 3}
    assert maybe_extract_prompt({"prompt": None, **implicit})["prompt"] == USER
    assert maybe_extract_prompt({"prompt": "old", **implicit})["prompt"] == USER


@pytest.mark.parametrize(
    ("row", "kind", "conversational"),
    [
        ({"text": "a"}, "language_modeling", False),
        ({"messages": USER}, "language_modeling", True),
        ({"prompt": "a"}, "prompt_only", False),
        ({"prompt": USER, "completion": A}, "prompt_completion", True),
        ({"chosen": A, "rejected": B}, "preference", True),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference", False),
        ({"prompt": "a", "completion": "b", "label": False}, "unpaired_preference", False),
        ({"input_ids": [1]}, "tokenized", False),
        ({"prompt": "a", "completion": None}, "prompt_only", False),
    ],
)
def test_formats(row, kind, conversational):
    assert detect_format(row) == kind
    assert is_conversational(row) is conversational


def test_unknown_columns_are_named():
    with pytest.raises(ValueError, match=r"filled columns \['question'\]"):
        detect_format({"question": "a", "text": None})


def test_sharegpt_becomes_chatml_and_the_row_stays_as_it_was():
    row = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "a"}]}
    assert maybe_convert_to_chatml(row) == {"messages": [*USER, *A]}
    assert row["conversations"][0] == {"from": "human", "value": "hi"}
    assert maybe_convert_to_chatml({"messages": USER}) == {"messages": USER}
    with pytest.raises(ValueError, match="both 'conversations' and 'messages'"):
        maybe_convert_to_chatml({"conversations": USER, "messages": USER})


def test_templates_render_each_format_to_text(tokenizer):
    start = "<|im_start|>user\nhi<|im_end|>\n"
    assert apply_chat_template({"messages": [*USER, *A]}, tokenizer) == {
        "text": f"{start}<|im_start|>assistant\na<|im_end|>\n"
    }
    prompt = f"{start}<|im_start|>assistant\n"
    assert apply_chat_template({"prompt": USER}, tokenizer) == {"prompt": prompt}
    assert apply_chat_template({"prompt": USER, "completion": A, "label": True}, tokenizer) == {
        "prompt": prompt,
        "completion": "a<|im_end|>\n",
        "label": True,
    }
    assert apply_chat_template({"prompt": USER, "chosen": A, "rejected": B}, tokenizer) == {
        "prompt": prompt,
        "chosen": "a<|im_end|>\n",
        "rejected": "b<|im_end|>\n",
    }
    prefilled = {"prompt": [*USER, {"role": "assistant", "content": "so"}]}
    assert apply_chat_template(prefilled, tokenizer) == {"prompt": prompt + "so"}
    assert maybe_apply_chat_template({"prompt": "plain"}, tokenizer) == {"prompt": "plain"}
    with pytest.raises(ValueError, match=r"columns \['completion'\]: want one of"):
        apply_chat_template({"completion": A}, tokenizer)


def test_templates_whose_prompt_opens_a_block_are_split_at_the_common_beginning(model_tokenizer):
    tokenizer = model_tokenizer("deepseek_r1_distill")
    row = apply_chat_template({"prompt": USER, "completion": A}, tokenizer)
    assert row == {
        "prompt": "<s><｜User｜>hi<｜Assistant｜>",
        "completion": "a<｜end▁of▁sentence｜>",
    }


@pytest.mark.parametrize(
    ("name", "options", "opened"),
    [
        ("deepseek_r1_distill", {}, True),
        ("qwen3_5_think", {}, True),
        ("qwen3_5_think", {"enable_thinking": False}, False),
        ("qwen3", {}, False),
        ("qwen3", {"enable_thinking": False}, False),
        ("llama3", {}, False),
        ("gptoss", {}, False),
    ],
)
def test_c1_prompts_say_whether_the_template_opened_a_block(model_tokenizer, name, options, opened):
    asked = [{"role": "user", "content": "what does <think> mean"}]
    assert tokenize_prompt({"prompt": asked}, model_tokenizer(name), **options).opened is opened


def test_plain_prompts_open_a_block_only_at_their_very_end(tokenizer):
    assert tokenize_prompt({"prompt": "Q\n<think>\n"}, tokenizer).opened
    assert not tokenize_prompt({"prompt": "the tag <think> opens"}, tokenizer).opened
    assert not tokenize_prompt({"prompt": "<think>a</think>"}, tokenizer).opened


def test_prompts_take_tools_and_keep_a_users_control_tokens_as_text(make_tokenizer):
    template = (
        "{% for t in tools or [] %}{{ t.name }} "
        "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    tokenizer = make_tokenizer(template)
    asked = [{"role": "user", "content": "hi<|im_end|>"}]
    prompt = tokenize_prompt({"prompt": asked}, tokenizer, tools=[{"name": "add"}])
    assert prompt.text == "add <|im_start|>user\nhi<|im_end|><|im_end|><|im_start|>"
    assert prompt.ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(prompt.ids) == prompt.text


@pytest.mark.parametrize("prompt", [None, 3, [], [{"content": "a"}], {"role": "user"}])
def test_prompts_of_another_type_are_refused(tokenizer, prompt):
    with pytest.raises(ValueError, match="column 'prompt'"):
        tokenize_prompt({"prompt": prompt}, tokenizer)
