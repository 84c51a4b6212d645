"""The audit: one row of each fault, counted by hand; hostile rows; what it shows."""

import pytest
from datasets import Dataset

from rl_data import AuditError, audit
from rl_data.checks import role_fault
from rl_data.show import show_trained

U = {"role": "user", "content": "hi"}
A = {"role": "assistant", "content": "hello"}


def test_a_healthy_dataset_takes_one_line(tokenizer):
    report = audit(
        Dataset.from_list([{"messages": [U, A]}] * 4), tokenizer, assistant_only_loss=True
    )
    assert report.ok
    assert report.summary().startswith("data audit of 4 rows: all well (8 of ")
    assert "\n" not in report.summary()
    length = len(tokenizer.apply_chat_template([U, A])["input_ids"])
    assert report.lengths == dict.fromkeys((50, 90, 95, 99, 100), length)
    assert report.tokens == 4 * length


FAULTY = {
    "no_trained_token": [{"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}],
    "cut": [{"text": "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 3}],
    "lost_eos": [{"text": "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 3}],
    "doubled_eos": [{"text": "hi<|im_end|>\n<|im_end|>"}, {"text": "hi<|im_end|><|im_end|>\n"}],
    "equal_pairs": [
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"chosen": [U, A], "rejected": [U, A]},
    ],
    "equal_after_cut": [{"prompt": "a", "chosen": "x" * 99 + "1", "rejected": "x" * 99 + "2"}],
    "prompt_not_prefix": [{"prompt": "hel", "completion": "lo"}],
    "role_order": [
        {"messages": [A, U, A]},
        {"messages": [U, U, A]},
        {"messages": [U]},
        {"prompt": [A, U]},
    ],
    "empty_text": [
        {"text": " \n"},
        {"prompt": "", "completion": "b"},
        {"messages": [U, {**A, "content": ""}]},
    ],
    "filled_nulls": [{"messages": [{**U, "tool_calls": None}, {**A, "name": None}]}],
    "unreadable": [
        {"text": None},
        {"text": 3},
        {"text": "half \ud800"},
        {"messages": [[U]]},
        {"messages": [{"role": "user", "content": "\udfff"}, A]},
        {"prompt": [1]},
        {"prompt": "a", "chosen": None, "rejected": "b"},
        {"prompt": "a", "chosen": 1, "rejected": 2},
        {"question": "a"},
        {1: 2},
        {},
        5,
        None,
        [1],
    ],
}
TIMES = {"filled_nulls": 2}


@pytest.mark.parametrize("fault", FAULTY)
def test_each_fault_is_counted_and_its_first_row_named(tokenizer, fault):
    healthy = {"prompt": "hello", "completion": " there"}
    rows = [healthy, *FAULTY[fault], healthy]
    report = audit(rows, tokenizer, max_length=64)
    assert report.rows == len(rows)
    assert report.counts[fault] == TIMES.get(fault, len(FAULTY[fault]))
    assert report.examples[fault].startswith("row 1")
    assert "row 1" in str(report)
    assert "⟦ there<|im_end|>⟧" in str(report)


def test_doubled_bos_and_missing_ends_depend_on_the_tokenizer(make_tokenizer):
    report = audit([{"text": "<s>hi"}, {"text": "hi"}], make_tokenizer(adds_bos=True))
    assert (report.counts["doubled_bos"], report.ok) == (1, True)
    open_ended = make_tokenizer(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    report = audit([{"messages": [U, A]}], open_ended)
    assert report.counts["no_end"] == 1


def test_strict_raises_with_the_report(tokenizer):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "b"}, {"text": 3}]
    with pytest.raises(AuditError, match="1 pairs whose sides are equal") as found:
        audit(rows, tokenizer, strict=True)
    assert found.value.report.counts["unreadable"] == 1
    assert audit([{"prompt": "a", "completion": " b"}], tokenizer, strict=True).ok


def test_every_format_is_audited_at_once_and_streams_are_sampled(tokenizer):
    rows = [
        {"text": "a"},
        {"messages": [U, A]},
        {"prompt": [U]},
        {"prompt": "a", "completion": " b"},
        {"prompt": "a", "completion": " b", "label": True},
        {"prompt": [U], "chosen": [A], "rejected": [{**A, "content": "no"}]},
        {"input_ids": [5, 6, 7]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    ]
    report = audit(rows, tokenizer)
    assert report.ok, str(report)
    assert sum(report.formats.values()) == len(rows)
    stream = Dataset.from_list([{"text": "hello there"}] * 30).to_iterable_dataset()
    assert audit(stream, tokenizer, max_rows=7).rows == 7
    table = Dataset.from_list([{"text": f"hello {k}"} for k in range(30)])
    sampled = audit(table, tokenizer, max_rows=3)
    assert (sampled.rows, sampled.total_rows) == (3, 30)
    assert "of 3 of 30 rows" in sampled.summary()


@pytest.mark.parametrize(
    ("roles", "complete", "fault"),
    [
        ("user assistant user assistant", True, ""),
        ("system user assistant tool tool assistant", True, ""),
        ("user assistant assistant", True, "two assistant messages in a row"),
        ("user assistant", False, ""),
        ("user", False, ""),
        ("user", True, "the last message is the user's"),
        ("user system assistant", True, "a system message after the first place"),
        ("user tool assistant", True, ""),
        ("user wizard", True, "unknown role 'wizard'"),
        ("tool assistant", True, "a tool message comes first"),
    ],
)
def test_the_order_of_roles(roles, complete, fault):
    assert role_fault([{"role": r} for r in roles.split()], complete=complete) == fault


def test_a_shown_row_colours_what_is_trained_and_disarms_control_characters(tokenizer):
    ids = tokenizer("hi\x1b[2J there")["input_ids"]
    mask = [0] * (len(ids) - 1) + [1]
    assert show_trained(tokenizer, ids, mask, color=False) == "hi\\x1b[2J⟦ there⟧"
    assert show_trained(tokenizer, ids, mask, color=True) == "hi\\x1b[2J\033[1;32m there\033[0m"
    assert show_trained(tokenizer, ids, mask, color=False, limit=2) == "hi … and 10 characters"
