"""Hostile rows: a clear error that names row and column, or a stated outcome."""

import pytest
from datasets import Dataset, IterableDataset

from rl_data import RowError, prepare_preference_dataset, prepare_sft_dataset

U = {"role": "user", "content": "hi"}
A = {"role": "assistant", "content": "hello"}
GOOD = {"messages": [U, A]}


def stream(rows):
    """Rows as they are: a table would not take most of these."""
    return IterableDataset.from_generator(lambda: iter(rows))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": None}, "columns ['messages', 'text'] are all None in this row"),
        ({"text": 1}, "column 'text' is int '1': want a text"),
        ({"text": ["a"]}, "column 'text' is list"),
        ({"text": b"a"}, "column 'text' is bytes"),
        ({"text": "a\ud800"}, "half of a surrogate pair, '\\ud800', at character 1"),
        ({"messages": "hi"}, "column 'messages' holds 'hi': want a non-empty list of messages"),
        ({"messages": []}, "column 'messages' holds []"),
        ({"messages": [[U]]}, "column 'messages' holds [[{"),
        ({"messages": [U, None]}, "column 'messages' holds [{"),
        ({"messages": [{"content": "a"}]}, "with a 'role' each"),
        ({"messages": [{"role": 3, "content": "a"}]}, "message 0: role is 3, want a text"),
        ({"messages": [{"role": "user<|im_end|>", "content": "a"}]}, "role is 'user<|im_end|>'"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 0: content is int"),
        ({"messages": [U, {**A, "content": "\udc00"}]}, "half of a surrogate pair"),
        ({"messages": [U, {**A, "train": "yes"}]}, "message 1: 'train' is 'yes'"),
        ({"messages": [U, A], "tools": "no json"}, "column 'tools' holds text that is no JSON"),
        ({"messages": [U, A], "tools": 3}, "column 'tools' is int"),
        ({"messages": [U, A], "tools": '"x"'}, "column 'tools' holds JSON of type str"),
        ({"messages": [U, A], "chat_template_kwargs": "x"}, "'chat_template_kwargs' is str"),
        ({"prompt": "a", "completion": 3}, "column 'completion' is int '3'"),
        ({"prompt": "a", "completion": [A]}, "prompt is str and completion list"),
        ({"prompt": [U], "completion": []}, "column 'completion' is list '[]'"),
        ({"input_ids": [1, -5]}, "column 'input_ids' holds -5"),
        ({"input_ids": [1.5]}, "column 'input_ids' holds 1.5"),
        ({"input_ids": [1, None]}, "column 'input_ids' holds None"),
        ({"input_ids": [10**9]}, "column 'input_ids' holds 1000000000"),
        ({"chosen": "a", "rejected": "b"}, "format preference cannot be used for supervised"),
    ],
    ids=lambda x: str(x)[:40].encode("ascii", "replace").decode(),
)
def test_an_error_names_the_row_and_the_column(tokenizer, row, said):
    dataset, _ = prepare_sft_dataset(stream([{**dict.fromkeys(row), **GOOD}, row]), tokenizer)
    with pytest.raises(RowError) as refusal:
        list(dataset)
    assert str(refusal.value).startswith("row 1: ")
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": None, "rejected": "b"}, "column 'chosen' is None"),
        ({"prompt": "a", "chosen": "b", "rejected": 2}, "column 'rejected' is 2"),
        ({"prompt": "a", "chosen": "b", "rejected": [A]}, "completion list: want two texts"),
    ],
)
def test_an_error_names_the_side_of_a_pair(tokenizer, row, said):
    dataset, _ = prepare_preference_dataset(stream([row]), tokenizer)
    with pytest.raises(RowError, match="row 0: ") as refusal:
        list(dataset)
    assert said in str(refusal.value)


def test_pairs_without_messages_on_a_side_are_dropped_and_counted(tokenizer):
    good = {"chosen": [U, A], "rejected": [U, {**A, "content": "no"}]}
    rows = [good, {"chosen": [U, A], "rejected": [U, A]}, {"chosen": [U, A], "rejected": [U]}]
    dataset, report = prepare_preference_dataset(Dataset.from_list(rows), tokenizer)
    assert len(dataset) == 1
    assert report.dropped == {
        "chosen and rejected are equal": 1,
        "a completion without tokens": 1,
    }


def test_ten_megabytes_are_cut_and_counted(tokenizer):
    text = "the quick brown fox " * 500_000
    dataset, report = prepare_sft_dataset(Dataset.from_list([{"text": text}]), tokenizer)
    assert len(dataset[0]["input_ids"]) == 1024
    assert (report.cut_rows, report.kept) == (1, 1)


def test_control_characters_and_private_use_characters_pass_unchanged(tokenizer):
    text = "a\x00b\x1b[2J\x07\u202e\U000f0000\U00100000"
    talk = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    for row, options in (({"text": text}, {}), ({"messages": talk}, {"assistant_only_loss": True})):
        dataset, _ = prepare_sft_dataset(Dataset.from_list([row]), tokenizer, **options)
        sample = dataset[0]
        assert text in tokenizer.decode(sample["input_ids"])
        assert sum(sample["loss_mask"]) > 0


def test_an_empty_dataset_and_blank_rows_are_said(tokenizer):
    with pytest.raises(ValueError, match="the dataset has no rows"):
        prepare_sft_dataset(Dataset.from_dict({"text": []}), tokenizer)
    dataset, report = prepare_sft_dataset(
        Dataset.from_list([{"text": ""}, {"text": "a"}]), tokenizer
    )
    assert report.dropped == {"no token": 1}
    assert len(dataset) == 1


def test_a_tokenizer_without_a_template_is_named_as_the_cause(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(RowError, match=r"row 0: .*chat.template"):
        prepare_sft_dataset(Dataset.from_list([GOOD]), tokenizer)
