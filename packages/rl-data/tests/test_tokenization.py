"""Rows to ids and masks: cutting (B), BOS and EOS (D5), prefixes (D2), flags (D8), caching (D9)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset, Value

from rl_data import RowError, SFTCollator, prepare_sft_dataset, tokenize_prompt
from rl_data.nulls import count_filled_nulls, drop_filled_nulls
from rl_data.tokenization import SFTStep

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "ok"},
]


def prepare(rows, tokenizer, **options):
    dataset, report = prepare_sft_dataset(Dataset.from_list(rows), tokenizer, **options)
    return [dataset[k] for k in range(len(dataset))], report


def trained(tokenizer, row):
    return tokenizer.decode(
        [i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m]
    )


def test_plain_text_gets_one_eos_and_its_first_token_is_not_trained(tokenizer):
    rows, report = prepare([{"text": "hello there"}], tokenizer)
    eos = tokenizer.eos_token_id
    assert rows[0]["input_ids"] == [*tokenizer("hello there")["input_ids"], eos]
    assert rows[0]["loss_mask"] == [0] + [1] * (len(rows[0]["input_ids"]) - 1)
    assert (report.rows, report.kept, report.dropped) == (1, 1, {})


def test_completion_only_is_the_default_where_there_is_a_completion(tokenizer):
    rows, _ = prepare([{"prompt": "hi", "completion": " there"}], tokenizer)
    assert trained(tokenizer, rows[0]) == " there<|im_end|>"
    whole, _ = prepare(
        [{"prompt": "hi", "completion": " there"}], tokenizer, completion_only_loss=False
    )
    assert whole[0]["loss_mask"][1:] == [1] * (len(whole[0]["input_ids"]) - 1)


def test_conversations_train_all_or_the_assistant_alone(tokenizer):
    rows, _ = prepare([{"messages": CHAT}], tokenizer)
    assert rows[0]["loss_mask"] == [0] + [1] * (len(rows[0]["input_ids"]) - 1)
    rows, _ = prepare([{"messages": CHAT}], tokenizer, assistant_only_loss=True)
    assert trained(tokenizer, rows[0]) == "hello<|im_end|>ok<|im_end|>"


def test_conversational_completions_train_the_assistants_turns_of_the_completion(tokenizer):
    row = {"prompt": CHAT[:1], "completion": CHAT[1:]}
    rows, report = prepare([row], tokenizer)
    assert trained(tokenizer, rows[0]) == "hello<|im_end|>ok<|im_end|>"
    rows, _ = prepare([{"prompt": CHAT[:3], "completion": CHAT[3:]}], tokenizer)
    assert trained(tokenizer, rows[0]) == "ok<|im_end|>"
    assert report.prompt_not_prefix == 0


def test_d1_ids_equal_those_of_apply_chat_template_that_returns_a_mapping(tokenizer):
    out = tokenizer.apply_chat_template(CHAT)
    assert not isinstance(out, list)
    assert "input_ids" in out
    rows, _ = prepare([{"messages": CHAT}], tokenizer)
    assert rows[0]["input_ids"] == out["input_ids"]
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True)
    assert tokenize_prompt({"prompt": CHAT[:1]}, tokenizer).ids == prompt["input_ids"]


def test_d7_the_header_is_trained_on_request(tokenizer):
    rows, _ = prepare([{"messages": CHAT}], tokenizer, assistant_only_loss=True, train_header=True)
    header = "<|im_start|>assistant\n"
    assert trained(tokenizer, rows[0]) == f"{header}hello<|im_end|>{header}ok<|im_end|>"


def test_d8_messages_marked_as_not_trained(tokenizer):
    marked = [CHAT[0], {**CHAT[1], "train": False}, *CHAT[2:]]
    rows, _ = prepare([{"messages": marked}], tokenizer, assistant_only_loss=True)
    assert trained(tokenizer, rows[0]) == "ok<|im_end|>"
    assert "train" not in tokenizer.decode(rows[0]["input_ids"])
    rows, _ = prepare([{"messages": marked}], tokenizer)
    assert "hello" not in trained(tokenizer, rows[0])
    assert trained(tokenizer, rows[0]).endswith("ok<|im_end|>\n")


def test_d8_a_flag_that_could_do_nothing_is_refused(tokenizer):
    marked = [{**CHAT[0], "train": True}, *CHAT[1:]]
    with pytest.raises(RowError, match=r"row 0: message 0 \(user\) has 'train': true"):
        prepare([{"messages": marked}], tokenizer, assistant_only_loss=True)


def test_d8_a_flag_on_a_message_that_cannot_be_found_is_refused(make_tokenizer):
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content | length }}{% endfor %}")
    with pytest.raises(
        RowError, match="message 0 has 'train': false, but the template rewrites it"
    ):
        prepare([{"messages": [{**CHAT[0], "train": False}, CHAT[1]]}], tokenizer)


def test_d7_a_header_option_that_could_do_nothing_is_refused(tokenizer):
    with pytest.raises(RowError, match="train_header=True does nothing where every token"):
        prepare([{"messages": CHAT}], tokenizer, train_header=True)


def test_streams_whose_rows_differ_in_columns_and_tables_with_columns_named_like_ours(tokenizer):
    rows = [{"text": "a"}, {"text": "b", "extra": 1}, {"other": 2, "text": "c"}]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    dataset, report = prepare_sft_dataset(stream, tokenizer)
    assert [set(row) for row in dataset] == [{"input_ids", "loss_mask"}] * 3
    named = {"text": "hi", "status": "x", "cut": "y", "loss_mask": None, "tokens": []}
    found, report = prepare([named], tokenizer)
    assert set(found[0]) == {"input_ids", "loss_mask"}
    assert report.kept == 1


def test_d2_the_mask_starts_at_the_true_common_prefix(tokenizer):
    """'hel' + 'lo' is tokenised as 'hello', so that the prompt's own ids do not begin the whole."""
    prompt, whole = tokenizer("hel")["input_ids"], tokenizer("hello")["input_ids"]
    shared = next(k for k in range(len(prompt) + 1) if prompt[: k + 1] != whole[: k + 1])
    assert shared < len(prompt)
    rows, report = prepare([{"prompt": "hel", "completion": "lo"}] * 3, tokenizer)
    mask = rows[0]["loss_mask"]
    assert mask[1:] == [int(k >= shared) for k in range(1, len(mask))]
    assert report.prompt_not_prefix == 3
    assert f"after {shared} shared tokens the prompt goes on" in report.prompt_not_prefix_example


def test_d2_a_reasoning_block_that_only_the_prompt_opens(make_tokenizer):
    tokenizer = make_tokenizer(
        CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    )
    rows, report = prepare([{"prompt": CHAT[:1], "completion": CHAT[1:2]}], tokenizer)
    assert trained(tokenizer, rows[0]) == "hello<|im_end|>"
    assert report.prompt_not_prefix == 1
    assert tokenize_prompt({"prompt": CHAT[:1]}, tokenizer).opened


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("writes_bos", [False, True])
def test_d5_one_bos_whoever_adds_it(make_tokenizer, adds_bos, writes_bos):
    tokenizer = make_tokenizer(("<s>" if writes_bos else "") + CHATML, adds_bos=adds_bos)
    bos = tokenizer.bos_token_id
    rows, _ = prepare([{"messages": CHAT}], tokenizer)
    assert rows[0]["input_ids"].count(bos) == int(writes_bos)
    prompt = tokenize_prompt({"prompt": CHAT[:1]}, tokenizer)
    assert prompt.ids.count(bos) == int(writes_bos)
    for text in ("hello", "<s>hello"):
        rows, _ = prepare([{"text": text}], tokenizer)
        assert rows[0]["input_ids"].count(bos) == int(adds_bos or text.startswith("<s>"))
        assert tokenize_prompt({"prompt": text}, tokenizer).ids.count(bos) == int(
            adds_bos or text.startswith("<s>")
        )


def test_d5_no_second_eos_after_an_eos_and_a_newline(tokenizer):
    eos = tokenizer.eos_token_id
    for text in ("hello<|im_end|>", "hello<|im_end|>\n", "hello<|im_end|> \n"):
        rows, _ = prepare([{"text": text}], tokenizer)
        assert rows[0]["input_ids"].count(eos) == 1
        assert rows[0]["input_ids"] == tokenizer(text)["input_ids"]
    rows, _ = prepare([{"messages": CHAT}], tokenizer)
    assert rows[0]["input_ids"].count(eos) == 4


def test_b1_pad_equal_to_eos_trains_the_real_eos_and_not_the_padding():
    eos = 9
    batch = SFTCollator(pad_token_id=eos)(
        [
            {"input_ids": [5, 6, eos], "loss_mask": [0, 1, 1]},
            {"input_ids": [1, 2, 3, 4, eos], "loss_mask": [0, 1, 1, 1, 1]},
        ]
    )
    assert batch["input_ids"][0].tolist() == [5, 6, eos, eos, eos]
    assert batch["loss_mask"][0].tolist() == [0, 1, 1, 0, 0]
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 0, 0]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 4]


def test_b2_a_completion_cut_away_whole_is_dropped_and_counted(tokenizer):
    kept = {"prompt": "a", "completion": "b"}
    rows, report = prepare(
        [{"prompt": "ab" * 10, "completion": "c"}, kept], tokenizer, max_length=8
    )
    assert len(rows) == 1
    assert report.dropped == {"every trained token lies past max_length": 1}
    with pytest.raises(ValueError, match="every trained token lies past max_length"):
        prepare([{"prompt": "ab" * 10, "completion": "c"}], tokenizer, max_length=8)


def test_d6_data_without_a_trained_token_is_refused_and_one_row_shown(tokenizer):
    row = {"messages": [CHAT[0], {**CHAT[1], "train": False}]}
    with pytest.raises(ValueError, match="no row can be trained") as refusal:
        prepare([row, row], tokenizer, assistant_only_loss=True)
    assert "<|im_start|>assistant\nhello<|im_end|>" in str(refusal.value)
    assert "dropped 2: no trained token" in str(refusal.value)


def test_b8_a_cut_text_ends_where_it_is_cut_at_either_end(tokenizer):
    ids = [*tokenizer("the quick brown fox")["input_ids"], tokenizer.eos_token_id]
    rows, report = prepare([{"text": "the quick brown fox"}], tokenizer, max_length=3)
    assert rows[0]["input_ids"] == ids[:3]
    assert (report.cut_rows, report.cut_tokens) == (1, len(ids) - 3)
    rows, _ = prepare(
        [{"text": "the quick brown fox"}], tokenizer, max_length=3, truncation_mode="keep_end"
    )
    assert rows[0]["input_ids"] == ids[-3:]
    assert rows[0]["loss_mask"] == [0, 1, 1]


def test_b9_an_empty_completion_trains_the_end_alone_and_is_counted(tokenizer):
    rows, report = prepare([{"prompt": "hi", "completion": ""}], tokenizer)
    assert trained(tokenizer, rows[0]) == "<|im_end|>"
    assert report.empty_completions == 1


def test_b9_a_completion_of_pad_is_no_end(make_tokenizer):
    """[5, PAD] does not end in EOS: the ids are taken as they are, and EOS is not invented."""
    tokenizer = make_tokenizer(extra=("<|pad|>",))
    pad = tokenizer.convert_tokens_to_ids("<|pad|>")
    rows, _ = prepare([{"input_ids": [5, pad]}], tokenizer)
    assert rows[0] == {"input_ids": [5, pad], "loss_mask": [0, 1]}


@pytest.mark.parametrize(
    ("given", "mask"),
    [
        ({}, [0, 1, 1]),
        ({"loss_mask": [0, 0, 1]}, [0, 0, 1]),
        ({"labels": [-100, 6, -100]}, [0, 1, 0]),
        ({"completion_mask": [0, 1, 1], "assistant_masks": [0, 0, 1]}, [0, 0, 1]),
    ],
)
def test_d9_tokenised_rows_are_taken_as_they_are(tokenizer, given, mask):
    rows, _ = prepare([{"input_ids": [5, 6, 7], **given}], tokenizer)
    assert rows == [{"input_ids": [5, 6, 7], "loss_mask": mask}]


def test_d9_rows_that_are_packed_already_keep_their_boundaries(tokenizer):
    row = {"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 0, 1]}
    rows, _ = prepare([row], tokenizer)
    assert rows == [{**row, "loss_mask": [0, 1, 0, 1]}]
    rows, report = prepare([row], tokenizer, max_length=3)
    assert rows[0]["position_ids"] == [0, 1, 0]
    assert report.cut_tokens == 1
    with pytest.raises(ValueError, match="they are packed already"):
        prepare([row], tokenizer, packing=True)
    with pytest.raises(RowError, match="column 'position_ids' has 1 entries for 4 input_ids"):
        prepare([{**row, "position_ids": [0]}], tokenizer)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ({"train": None}, r"a dict of splits \['train'\]: pass one of them"),
        ([{"text": "a"}], "the dataset is list, want a datasets.Dataset"),
        (None, "the dataset is NoneType"),
    ],
)
def test_what_is_no_dataset_is_refused(tokenizer, dataset, said):
    with pytest.raises(ValueError, match=said):
        prepare_sft_dataset(dataset, tokenizer)


def test_several_processes_give_the_same_rows_and_name_the_same_bad_one(tokenizer):
    rows = [{"messages": CHAT, "id": k} for k in range(8)]
    one, report = prepare_sft_dataset(Dataset.from_list(rows), tokenizer)
    two, other = prepare_sft_dataset(Dataset.from_list(rows), tokenizer, num_proc=2)
    assert one[:] == two[:]
    assert report == other
    bad = Dataset.from_list([{"text": "a"}] * 7 + [{"text": None}])
    with pytest.raises(ValueError, match=r"row 7: columns \['text'\] are all None"):
        prepare_sft_dataset(bad, tokenizer, num_proc=2)


def test_d9_a_mask_of_another_length_is_refused(tokenizer):
    with pytest.raises(RowError, match="row 0: column 'loss_mask' has 2 entries for 3 input_ids"):
        prepare([{"input_ids": [5, 6, 7], "loss_mask": [0, 1]}], tokenizer)


HASH = """
import sys
sys.path.insert(0, sys.argv[1])
from conftest import CHATML, train_bpe
from datasets.fingerprint import Hasher
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from rl_data.nulls import count_filled_nulls, drop_filled_nulls
from rl_data.tokenization import SFTStep
backend = Tokenizer.from_str(train_bpe())
made = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML, eos_token="<e>")
print(Hasher.hash(SFTStep(made, 64, "keep_start", {"assistant_only_loss": True})))
"""


def test_d9_the_step_hashes_the_same_in_two_runs():
    outs = set()
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", HASH, str(Path(__file__).parent)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        outs.add(run.stdout.split()[-1])
    assert len(outs) == 1


def test_d9_what_the_tokenizer_did_before_does_not_change_the_hash(make_tokenizer):
    from datasets.fingerprint import Hasher

    tokenizer = make_tokenizer(pad_token="<|pad|>")
    step = SFTStep(tokenizer, 64, "keep_start", {})
    before = Hasher.hash(step)
    step({"messages": [CHAT]}, [0])
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=2)
    assert Hasher.hash(step) == before


def test_d9_the_second_run_reads_the_cache(tokenizer, tmp_path):
    Dataset.from_list([{"messages": CHAT}]).save_to_disk(tmp_path)
    runs = []
    for _ in range(2):
        rows, report = prepare_sft_dataset(Dataset.load_from_disk(tmp_path), tokenizer)
        runs.append((rows.cache_files[0]["filename"], report))
    assert runs[0] == runs[1]
    assert runs[0][1].trained_tokens > 0


def test_d4_keys_filled_by_arrow_do_not_reach_the_prompt_and_meant_nulls_stay(make_tokenizer):
    template = (
        "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m | tojson }}<|im_end|>\n{% endfor %}"
    )
    tokenizer = make_tokenizer(template)

    def tool(name, properties):
        return {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
        }

    tools = [
        tool("a", {"x": {"type": "string", "default": None}}),
        tool("b", {"y": {"type": "integer", "enum": [1, None]}}),
    ]
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "yo",
            "tool_calls": [{"name": "a", "arguments": {"x": "1"}}],
        },
        {
            "role": "assistant",
            "content": "yo",
            "tool_calls": [{"name": "b", "arguments": {"y": 2}}],
        },
    ]
    filled = Dataset.from_list([{"messages": messages, "tools": tools}])
    assert filled[0]["tools"][1]["function"]["parameters"]["properties"]["x"] is None
    dataset, _ = prepare_sft_dataset(filled, tokenizer)
    text = tokenizer.decode(dataset[0]["input_ids"])
    written = [json.loads(line) for line in text.split("<|im_start|>")[0].splitlines()]
    assert written == tools
    assert json.loads(text.split("<|im_start|>")[3].split("<|im_end|>")[0]) == messages[2]
    assert text.count("null") == 2


def test_d4_columns_of_json_are_taken_word_for_word():
    class Json:
        """Stands for the feature of that name, which older versions of datasets lack."""

    value = {"x": None, "y": [{"z": None}]}
    assert drop_filled_nulls(value, Json()) == value
    assert count_filled_nulls(value, Json()) == 0
    assert drop_filled_nulls(value) == {"y": [{}]}
    assert count_filled_nulls(value) == 2


@pytest.mark.parametrize(
    ("kind", "others_hold", "kept"),
    [
        ("string", "null", True),
        ("string", "string", False),
        (["string", "null"], "string", True),
    ],
)
def test_d4_a_null_default_where_other_rows_hold_one(kind, others_hold, kept):
    """Its own type and the column's tell whether it was written or filled in."""
    feature = {"x": {"type": Value("string"), "default": Value(others_hold)}}
    cleaned = drop_filled_nulls({"x": {"type": kind, "default": None}}, feature)
    assert ("default" in cleaned["x"]) is kept


def test_d4_tools_as_json_text_are_taken_word_for_word(make_tokenizer):
    tokenizer = make_tokenizer(
        "{% for t in tools %}{{ t | tojson }}{% endfor %}{{ messages[0].content }}"
    )
    tools = '[{"name": "a", "parameters": {"x": null}}]'
    rows, _ = prepare([{"messages": CHAT, "tools": tools}], tokenizer)
    assert '{"name": "a", "parameters": {"x": null}}' in tokenizer.decode(rows[0]["input_ids"])


def test_rows_may_bring_template_options_and_a_formatting_function_makes_texts(make_tokenizer):
    tokenizer = make_tokenizer("{{ mood }}:{% for m in messages %}{{ m.content }}{% endfor %}")
    row = {"messages": CHAT, "chat_template_kwargs": {"mood": "glad"}}
    rows, _ = prepare([row], tokenizer)
    assert tokenizer.decode(rows[0]["input_ids"]).startswith("glad:hi")
    rows, _ = prepare([{"a": 1}], tokenizer, formatting_func=lambda r: f"n={r['a']}")
    assert tokenizer.decode(rows[0]["input_ids"]) == "n=1<|im_end|>"


@pytest.mark.parametrize("packing", [False, True])
def test_streaming_gives_what_map_style_gives(tokenizer, packing):
    rows = [{"messages": CHAT[: 2 + 2 * (k % 2)]} for k in range(30)]
    rows.append({"messages": [CHAT[0]]})  # nothing to train: dropped in both
    options = {"assistant_only_loss": True, "packing": packing, "max_length": 120}
    table, table_report = prepare_sft_dataset(Dataset.from_list(rows), tokenizer, **options)
    stream, report = prepare_sft_dataset(
        Dataset.from_list(rows).to_iterable_dataset(), tokenizer, **options
    )
    for _ in range(2):  # a second pass counts anew
        assert list(stream) == [table[k] for k in range(len(table))]
        assert report.dropped == {"no trained token": 1}
        assert (report.rows, report.tokens) == (table_report.rows, table_report.tokens)


def test_counts_add_up_and_the_report_says_so(tokenizer):
    rows = [
        {"prompt": "hi", "completion": " you"},
        {"prompt": "x" * 50, "completion": "y"},
        {"prompt": "hi", "completion": "z" * 50},
    ]
    _, report = prepare(rows, tokenizer, max_length=20)
    assert report.rows == report.kept + report.dropped_rows == 3
    assert report.cut_rows == 1
    said = str(report)
    assert "2 of 3 rows kept" in said
    assert "cut 1 rows" in said
    assert report.as_dict()["kept"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 1}, "max_length=1: want at least 2"),
        ({"truncation_mode": "middle"}, "truncation_mode='middle'"),
        ({"packing": True, "max_length": None}, "packing=True wants a max_length"),
        ({"packing_strategy": "ffd"}, "packing_strategy='ffd'"),
        ({"completion_only_loss": True}, "completion_only_loss=True wants rows with prompt"),
        ({"assistant_only_loss": True}, "assistant_only_loss=True wants conversations"),
        ({"train_header": True}, "train_header=True wants conversations"),
        ({"tools": [{"name": "a"}]}, "tools wants conversations"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs wants conversations"),
        ({"formatting_func": lambda row: 3}, "formatting_func returned int"),
    ],
)
def test_options_that_cannot_work_are_refused_in_one_line(tokenizer, options, message):
    with pytest.raises(ValueError, match=message.split("=")[0]) as refusal:
        prepare([{"text": "hello"}], tokenizer, **options)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
