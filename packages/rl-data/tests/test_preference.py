"""Pairs and unpaired rows: shared prompt, exact cutting, equal pairs (B3, B4), collators."""

import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from rl_data import (
    PreferenceCollator,
    RowError,
    UnpairedCollator,
    maybe_unpair_preference_dataset,
    prepare_preference_dataset,
    prepare_unpaired_dataset,
    unpair_preference_dataset,
)
from rl_data.preference import Pair, truncate_pair

USER = [{"role": "user", "content": "hi"}]


def says(text):
    return [{"role": "assistant", "content": text}]


def test_plain_pairs_share_their_prompt_and_end_in_eos(tokenizer):
    row = {"prompt": "hi", "chosen": " there", "rejected": " you"}
    dataset, report = prepare_preference_dataset(Dataset.from_list([row]), tokenizer)
    eos = tokenizer.eos_token_id
    assert dataset[0] == {
        "prompt_ids": tokenizer("hi")["input_ids"],
        "chosen_ids": [*tokenizer(" there")["input_ids"], eos],
        "chosen_mask": [1] * (len(tokenizer(" there")["input_ids"]) + 1),
        "rejected_ids": [*tokenizer(" you")["input_ids"], eos],
        "rejected_mask": [1] * (len(tokenizer(" you")["input_ids"]) + 1),
    }
    assert report.dropped == {}


@pytest.mark.parametrize("stream", [False, True])
def test_conversational_pairs_with_and_without_a_prompt_column_are_the_same(tokenizer, stream):
    explicit = [{"prompt": USER, "chosen": says("a"), "rejected": says("b")}]
    implicit = [{"chosen": [*USER, *says("a")], "rejected": [*USER, *says("b")]}]
    found = []
    for rows in (explicit, implicit):
        source = Dataset.from_list(rows)
        dataset, _ = prepare_preference_dataset(
            source.to_iterable_dataset() if stream else source, tokenizer
        )
        found.append(list(dataset))
    assert found[0] == found[1]
    row = found[0][0]
    prompt = tokenizer.apply_chat_template(USER, add_generation_prompt=True)["input_ids"]
    assert row["prompt_ids"] == prompt
    assert tokenizer.decode(row["chosen_ids"]) == "a<|im_end|>\n"
    assert row["chosen_mask"] == [1, 1, 0]


def test_b3_lengths_3_and_20_within_10():
    pair = Pair([1, 2, 3, 4], [5] * 3, [1] * 3, [6] * 20, [1] * 20)
    cut, reason = truncate_pair(pair, 10)
    assert (len(cut.prompt), len(cut.chosen), len(cut.rejected), reason) == (4, 3, 6, "")
    cut, reason = truncate_pair(pair, 10, "keep_end")
    assert (cut.prompt, len(cut.chosen), len(cut.rejected), reason) == ([4], 3, 9, "")
    long_prompt = Pair(list(range(1, 13)), [5] * 3, [1] * 3, [6] * 20, [1] * 20)
    _, reason = truncate_pair(long_prompt, 10)
    assert reason == "every trained token lies past max_length"


@given(
    st.integers(0, 12),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(2, 14),
    st.sampled_from(["keep_start", "keep_end"]),
)
def test_b3_cutting_is_exact_and_never_more_than_needed(prompt, chosen, rejected, limit, mode):
    pair = Pair(list(range(prompt)), [50] * chosen, [1] * chosen, [60] * rejected, [1] * rejected)
    cut, reason = truncate_pair(pair, limit, mode)
    if reason:
        assert prompt >= limit
        return
    longest = len(cut.prompt) + max(len(cut.chosen), len(cut.rejected))
    assert longest == min(limit, prompt + max(chosen, rejected))
    assert cut.chosen
    assert cut.rejected
    assert len(cut.chosen) == len(cut.chosen_mask)
    if prompt + max(chosen, rejected) <= limit:
        assert cut == pair
    if mode == "keep_end":
        assert cut.prompt == list(range(prompt))[prompt - len(cut.prompt) :]


def test_b4_pairs_that_differ_only_past_the_limit_are_dropped_and_counted(tokenizer):
    rows = [
        {"prompt": "hi", "chosen": " abcdefgh1", "rejected": " abcdefgh2"},
        {"prompt": "hi", "chosen": " same", "rejected": " same"},
        {"prompt": "hi", "chosen": " a", "rejected": " b"},
    ]
    dataset, report = prepare_preference_dataset(Dataset.from_list(rows), tokenizer, max_length=6)
    assert len(dataset) == 1
    assert report.dropped == {
        "chosen and rejected differ only past max_length": 1,
        "chosen and rejected are equal": 1,
    }


def test_unpairing_keeps_labels_order_and_other_columns():
    rows = Dataset.from_dict(
        {"prompt": ["p", "q"], "chosen": ["a", "c"], "rejected": ["b", "d"], "n": [1, 2]}
    )
    expected = {
        "prompt": ["p", "q", "p", "q"],
        "n": [1, 2, 1, 2],
        "completion": ["a", "c", "b", "d"],
        "label": [True, True, False, False],
    }
    assert unpair_preference_dataset(rows).to_dict() == expected
    assert maybe_unpair_preference_dataset(DatasetDict(t=rows))["t"].to_dict() == expected
    assert list(unpair_preference_dataset(rows.to_iterable_dataset()))[3]["completion"] == "d"
    judged = Dataset.from_dict({"prompt": ["p"], "completion": ["a"], "label": [True]})
    assert maybe_unpair_preference_dataset(judged) is judged


def test_unpaired_rows_come_from_judged_rows_and_from_pairs(tokenizer):
    judged = [
        {"prompt": "hi", "completion": " there", "label": True},
        {"prompt": "hi", "completion": " you", "label": False},
    ]
    paired = [{"prompt": "hi", "chosen": " there", "rejected": " you"}]
    found = [
        list(prepare_unpaired_dataset(Dataset.from_list(rows), tokenizer)[0])
        for rows in (judged, paired)
    ]
    assert found[0] == found[1]
    assert [row["label"] for row in found[0]] == [True, False]
    with pytest.raises(RowError, match="row 0: column 'label' is 'good', want true or false"):
        prepare_unpaired_dataset(Dataset.from_list([{**judged[0], "label": "good"}]), tokenizer)


ROWS = [
    {
        "prompt_ids": [1, 2],
        "chosen_ids": [3],
        "chosen_mask": [1],
        "rejected_ids": [4, 5],
        "rejected_mask": [1, 1],
    },
    {
        "prompt_ids": [6],
        "chosen_ids": [7, 8],
        "chosen_mask": [1, 0],
        "rejected_ids": [9],
        "rejected_mask": [1],
    },
]


def test_pairs_are_padded_chosen_first():
    batch = PreferenceCollator(0)(ROWS)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [6, 7, 8, 0], [1, 2, 4, 5], [6, 9, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 1, 1], [0, 1, 0, 0]]
    assert batch["prompt_lengths"].tolist() == [2, 1, 2, 1]


def test_unpaired_rows_are_padded_with_labels_and_mismatched_completions():
    rows = [
        {"prompt_ids": [1, 2], "completion_ids": [3], "completion_mask": [1], "label": True},
        {"prompt_ids": [4], "completion_ids": [5, 6], "completion_mask": [1, 1], "label": False},
    ]
    batch = UnpairedCollator(0, mismatched=True)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch["labels"].tolist() == [True, False]
    assert batch["kl_input_ids"].tolist() == [[1, 2, 5, 6], [4, 3, 0, 0]]
    assert batch["kl_loss_mask"].tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    with pytest.raises(ValueError, match="at least 2 rows in a batch, seen 1"):
        UnpairedCollator(0, mismatched=True)(rows[:1])
