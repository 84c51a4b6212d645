"""Which token or text ends a completion: cases B9, C2, C7 and C8."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_decode import (
    collect_stop_ids,
    collect_stop_strings,
    cut_at_stop,
    ended_by_stop,
    ends_with_stop_string,
)


@pytest.mark.parametrize(
    ("ids", "kept", "reason"),
    [
        ([5, 6, 7], [5, 6, 7], "stop"),
        ([5, 6, 9], [5, 6, 9], "stop"),
        ([5, 9, 6, 7, 1], [5, 9], "stop"),
        ([7], [7], "stop"),
        ([5, 6], [5, 6], "length"),
        ([], [], "empty"),
    ],
)
def test_c2_rows_end_at_the_first_of_several_stop_ids(ids, kept, reason):
    for stops in ({7, 9}, [9, 7], (7, 9, 7)):
        assert cut_at_stop(ids, stops) == (kept, reason)
    assert cut_at_stop(torch.tensor(ids, dtype=torch.long), {7, 9}) == (kept, reason)
    assert cut_at_stop(np.array(ids, dtype=np.int32), {7, 9}) == (kept, reason)


@pytest.mark.parametrize(
    ("max_length", "kept", "reason"),
    [(0, [], "empty"), (1, [5], "length"), (2, [5, 9], "stop"), (9, [5, 9], "stop")],
)
def test_a_stop_past_the_length_limit_was_never_sampled(max_length, kept, reason):
    assert cut_at_stop([5, 9, 6], {9}, max_length=max_length) == (kept, reason)


def test_cutting_agrees_with_a_plain_loop():
    rng = np.random.default_rng(0)
    for _ in range(300):
        ids = rng.integers(0, 12, size=rng.integers(0, 9)).tolist()
        stops = set(rng.integers(0, 12, size=rng.integers(0, 4)).tolist())
        expected = []
        for i in ids:
            expected.append(i)
            if i in stops:
                break
        ended = bool(expected) and expected[-1] in stops
        assert cut_at_stop(ids, stops) == (
            expected,
            "stop" if ended else "length" if expected else "empty",
        )


def test_b9_neither_an_empty_nor_a_padded_completion_counts_as_ended():
    assert not ended_by_stop([], {2})
    assert not ended_by_stop([5, 0], {2})
    assert not ended_by_stop([5, 2], {2}, length=1)  # padded with an id that is also the stop


def test_c8_the_end_token_penalty_looks_at_the_completion_alone(bpe):
    prompt = bpe.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    stops = collect_stop_ids(bpe)
    assert ended_by_stop(prompt, stops)  # the trap: any chat prompt would count as ended
    assert not ended_by_stop(bpe.encode("still going"), stops)
    assert ended_by_stop(bpe.encode("done<|im_end|>"), stops)


def test_c7_the_templates_end_of_turn_and_the_tokenizers_eos_both_stop(bpe):
    eos, turn = bpe.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert collect_stop_ids(bpe) == (eos, turn)


@pytest.mark.parametrize(
    ("tokens", "template", "expected"),
    [
        # Phi 3 writes its end of turn and then the end of text.
        (
            ("<|user|>", "<|assistant|>", "<|end|>"),
            "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
            "<eos>",
            ["<eos>", "<|end|>"],
        ),
        # Llama 3 trims what the assistant says.
        (
            ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
            "{{ m['content'] | trim }}<|eot_id|>{% endfor %}",
            ["<eos>", "<|eot_id|>"],
        ),
        # Cohere closes the answer with a marker, which is no end of turn.
        (
            (
                "<|START_THINKING|>",
                "<|END_THINKING|>",
                "<|START_RESPONSE|>",
                "<|END_RESPONSE|>",
                "<|END_OF_TURN_TOKEN|>",
            ),
            "{% for m in messages %}<|START_RESPONSE|>{{ m['content'] }}<|END_RESPONSE|>"
            "<|END_OF_TURN_TOKEN|>{% endfor %}",
            ["<eos>", "<|END_OF_TURN_TOKEN|>"],
        ),
        # In harmony <|end|> ends a message, and the analysis is one: it may not stop generation.
        (
            ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
            "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>"
            "{% endfor %}<|return|>",
            ["<eos>", "<|return|>"],
        ),
        # The same on a tokenizer that has no thinking tokens.
        (
            ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"),
            "{% for m in messages %}<|START_RESPONSE|>{{ m['content'] }}<|END_RESPONSE|>"
            "<|END_OF_TURN_TOKEN|>{% endfor %}",
            ["<eos>", "<|END_OF_TURN_TOKEN|>"],
        ),
        # GLM 4 ends a turn with the next one's header alone.
        (
            ("<|user|>", "<|assistant|>"),
            "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}",
            ["<eos>", "<|user|>"],
        ),
        # Phi 4 mini with tools: the template loops over tools that may not be there.
        (
            ("<|user|>", "<|assistant|>", "<|end|>"),
            "{% for tool in tools %}{{ tool }}{% endfor %}"
            "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}",
            ["<eos>", "<|end|>"],
        ),
        # A template that refuses the probe, and one that ends without a token.
        ((), "{{ raise_exception('only one turn') }}", ["<eos>"]),
        ((), "{% for m in messages %}{{ m['content'] }}\n{% endfor %}", ["<eos>"]),
        ((), None, ["<eos>"]),
    ],
)
def test_c7_stops_of_the_templates_in_use(with_tokens, tokens, template, expected):
    tokenizer = with_tokens(*tokens, template=template)
    assert collect_stop_ids(tokenizer) == tuple(tokenizer.convert_tokens_to_ids(expected))


def test_stop_ids_come_from_the_tokenizer_the_generation_config_and_the_caller():
    tokenizer = SimpleNamespace(eos_token_id=3)
    config = SimpleNamespace(eos_token_id=[3, 8])
    assert collect_stop_ids(tokenizer, config, extra=[5, 8]) == (3, 8, 5)
    assert collect_stop_ids(tokenizer, SimpleNamespace(eos_token_id=torch.tensor([8, 3]))) == (3, 8)
    assert collect_stop_ids(tokenizer, {"eos_token_id": 8}, extra=torch.tensor([1])) == (3, 8, 1)
    assert collect_stop_ids(SimpleNamespace(eos_token_id=None), {"eos_token_id": -1}) == ()
    assert collect_stop_ids(SimpleNamespace(tokenizer=tokenizer)) == (3,)  # a processor


def test_extra_stops_may_be_spelled(bpe):
    tool = bpe.convert_tokens_to_ids("<|tool|>")
    assert collect_stop_ids(bpe, extra="<|tool|>")[-1] == tool
    with pytest.raises(ValueError, match="'never seen' is not a token of this vocabulary"):
        collect_stop_ids(bpe, extra=["never seen"])
    with pytest.raises(ValueError, match="extra stop -1"):
        collect_stop_ids(bpe, extra=[-1])


def test_stop_strings_come_from_the_generation_config_and_the_caller():
    config = SimpleNamespace(stop_strings="\n\n")
    assert collect_stop_strings(config, ["</answer>", "\n\n"]) == ("\n\n", "</answer>")
    assert collect_stop_strings(SimpleNamespace(stop_strings=None)) == ()
    with pytest.raises(ValueError, match="stop string ''"):
        collect_stop_strings(extra=[""])


def test_an_engine_sees_a_stop_string_at_the_token_that_completes_it(any_tokenizer):
    ids = any_tokenizer.encode("is four, and so is naïve text", add_special_tokens=False)
    for stop in ("so is", "o i", "four", "naïve"):
        seen = [
            ends_with_stop_string(ids[:n], any_tokenizer, [stop, "never"])
            for n in range(len(ids) + 1)
        ]
        texts = [any_tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
        first = next(n for n, text in enumerate(texts) if stop in text)
        assert seen[:first] == [None] * first
        assert seen[first] == stop


def test_an_engine_decodes_no_more_than_a_stop_string_can_span(bpe):
    class Counting:
        longest = 0

        def decode(self, ids):
            Counting.longest = max(Counting.longest, len(ids))
            return bpe.decode(ids)

    ids = bpe.encode("filler " * 500 + "STOP")
    assert ends_with_stop_string(ids, Counting(), "STOP") == "STOP"
    assert Counting.longest <= 16
