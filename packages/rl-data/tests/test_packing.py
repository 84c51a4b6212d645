"""Packing: nothing lost uncounted, masks with ids, samples apart (B5, B6, B7, B11)."""

from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from closeness import assert_close
from rl_data import SFTCollator, pack_dataset, prepare_sft_dataset
from rl_data.packing import best_fit_decreasing


def numbered(lengths, **more):
    """Rows whose tokens are all different, so that each can be followed."""
    ends = np.cumsum(lengths)
    ids = [list(range(e - n, e)) for n, e in zip(lengths, ends, strict=True)]
    return Dataset.from_dict(
        {"input_ids": ids, "loss_mask": [[i % 3 % 2 for i in row] for row in ids], **more}
    )


def rows_of(dataset):
    return [dataset[k] for k in range(len(dataset))]


def test_b5_bfd_keeps_heads_and_says_what_is_lost(caplog):
    """Lengths 5, 2, 3, 1 into 4."""
    packed = rows_of(pack_dataset(numbered([5, 2, 3, 1]), 4, "bfd"))
    assert [row["input_ids"] for row in packed] == [[0, 1, 2, 3], [5, 6], [7, 8, 9, 10]]
    assert [row["seq_lengths"] for row in packed] == [[4], [2], [3, 1]]
    assert "cut 1 rows to 4 tokens and lost 1 tokens" in caplog.text


def test_b5_bfd_split_and_wrapped_lose_nothing():
    split = rows_of(pack_dataset(numbered([5, 2, 3, 1]), 4, "bfd_split"))
    assert [row["input_ids"] for row in split] == [[0, 1, 2, 3], [4, 7, 8, 9], [5, 6, 10]]
    assert [row["position_ids"] for row in split] == [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 0]]
    wrapped = rows_of(pack_dataset(numbered([5, 2, 3, 1]), 4, "wrapped"))
    assert [row["input_ids"] for row in wrapped] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert [row["position_ids"] for row in wrapped] == [[0, 1, 2, 3], [0, 0, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_b5_masks_and_labels_are_packed_with_their_ids_and_nothing_else_is(strategy):
    dataset = numbered([5, 2, 3, 1], labels=[[7] * 5, [8] * 2, [9] * 3, [1]], name=list("abcd"))
    for row in rows_of(pack_dataset(dataset, 4, strategy)):
        assert row["loss_mask"] == [i % 3 % 2 for i in row["input_ids"]]
        assert row["labels"] == [
            7 if i < 5 else 8 if i < 7 else 9 if i < 10 else 1 for i in row["input_ids"]
        ]
        assert "name" not in row


def test_b6_one_more_place_changes_nothing():
    lengths = np.random.default_rng(0).integers(1, 2000, 3000)
    ratios = [len(lengths) / len(best_fit_decreasing(lengths, n)) for n in (8192, 8193)]
    assert_close(ratios[0], ratios[1], rtol=5e-3)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("stream", [False, True])
def test_b11_several_batches_each_keep_their_own_tokens(strategy, stream):
    lengths = np.random.default_rng(1).integers(1, 9, 3500).tolist()
    dataset = numbered(lengths)
    source = dataset.to_iterable_dataset() if stream else dataset
    packed = list(pack_dataset(source, 16, strategy, window=1000))
    tokens = [i for row in packed for i in row["input_ids"]]
    assert sorted(tokens) == list(range(sum(lengths)))
    # a window's last pack may be short, no other one of 'wrapped'
    short = sum(len(row["input_ids"]) < 16 for row in packed)
    assert strategy != "wrapped" or short <= 4
    for row in packed:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) <= 16
        assert row["position_ids"] == [k for n in row["seq_lengths"] for k in range(n)]


def test_the_packs_of_a_log_normal_mix_are_98_percent_full():
    lengths = np.random.default_rng(2).lognormal(np.log(200), 1.0, 20_000).astype(int).clip(1, 2048)
    bins = best_fit_decreasing(lengths, 2048)
    assert lengths.sum() / (len(bins) * 2048) >= 0.98


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 12), max_size=30),
    st.integers(1, 10),
    st.sampled_from(["bfd", "bfd_split", "wrapped"]),
)
def test_packing_keeps_the_multiset_of_tokens(lengths, capacity, strategy):
    if not lengths:
        return
    packed = rows_of(pack_dataset(numbered(lengths), capacity, strategy))
    found = Counter(i for row in packed for i in row["input_ids"])
    ends = np.cumsum(lengths).tolist()
    if strategy == "bfd":
        kept = [i for n, e in zip(lengths, ends, strict=True) for i in range(e - n, e)[:capacity]]
        assert found == Counter(kept)
    else:
        assert found == Counter(range(sum(lengths)))
    assert all(0 < len(row["input_ids"]) <= capacity for row in packed)


def plain_best_fit(lengths, capacity):
    """The definition, item by item: the fullest bin that still has room."""
    rooms = []
    for size in sorted(lengths, reverse=True):
        fitting = [k for k, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda k: rooms[k])] -= size
        else:
            rooms.append(capacity - size)
    return sorted(rooms)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_best_fit_fills_the_bins_that_the_definition_fills(lengths, capacity):
    bins = best_fit_decreasing(lengths, capacity)
    assert sorted(k for b in bins for k in b) == list(range(len(lengths)))
    rooms = sorted(capacity - sum(lengths[k] for k in b) for b in bins)
    assert rooms == plain_best_fit(lengths, capacity)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_b7_a_packed_sample_does_not_move_its_neighbours(attention):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).eval()
    samples = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
    changed = [samples[0], [40, 41, 42], samples[2]]

    def logits(rows):
        packed = pack_dataset(Dataset.from_dict({"input_ids": rows}), 16)
        assert len(packed) == 1
        batch = SFTCollator(0)([packed[0]])
        # Given neither mask nor cache, the model sees from the position ids where samples begin.
        with torch.no_grad():
            out = model(
                input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
            )
        start, found = 0, {}
        for length in packed[0]["seq_lengths"]:
            key = tuple(batch["input_ids"][0, start : start + length].tolist())
            found[key] = out.logits[0, start : start + length]
            start += length
        return found

    before, after = logits(samples), logits(changed)
    for sample in (samples[0], samples[2]):
        assert_close(after[tuple(sample)], before[tuple(sample)], atol=1e-6)
        with torch.no_grad():
            alone = model(input_ids=torch.tensor([sample])).logits[0]
        assert_close(before[tuple(sample)], alone, rtol=1e-4, atol=1e-5)


def test_the_first_token_of_each_packed_piece_is_not_trained(tokenizer):
    dataset = Dataset.from_list([{"text": "hello there world"}] * 7)
    for strategy in ("bfd", "bfd_split", "wrapped"):
        packed, report = prepare_sft_dataset(
            dataset, tokenizer, packing=True, packing_strategy=strategy, max_length=6
        )
        for row in rows_of(packed):
            assert all(
                m == int(p > 0) for m, p in zip(row["loss_mask"], row["position_ids"], strict=True)
            )
        assert report.packs == len(packed)
        assert report.fill == sum(len(r["input_ids"]) for r in rows_of(packed)) / (6 * len(packed))


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match=r"strategy='ffd': want one of"):
        pack_dataset(numbered([1]), 4, "ffd")
    with pytest.raises(ValueError, match="seq_length=0"):
        pack_dataset(numbered([1]), 0)
    with pytest.raises(ValueError, match=r"columns \['text'\]: want 'input_ids'"):
        pack_dataset(Dataset.from_dict({"text": ["a"]}), 4)
    with pytest.raises(ValueError, match="lengths from 1 to 5: want 1 to the capacity 4"):
        best_fit_decreasing([1, 5], 4)


def test_padding_is_no_further_sample_and_rounds_up():
    batch = SFTCollator(0, pad_to_multiple_of=8)(
        [{"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}]
    )
    assert batch["position_ids"][0].tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert batch["loss_mask"][0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
