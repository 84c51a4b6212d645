from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_models import CompletionBatch, SequenceBatch

IDS = torch.tensor([[5, 6, 7], [8, 9, 0]])


def test_a_sequence_batch_refuses_what_cannot_be_scored():
    ok = torch.tensor([[0, 1, 1], [0, 1, 0]])
    with pytest.raises(ValueError, match=r"score_mask has shape \[2, 2\]"):
        SequenceBatch(IDS, ok[:, :2])
    with pytest.raises(ValueError, match="first token of a sample"):
        SequenceBatch(IDS, torch.ones(2, 3))
    with pytest.raises(ValueError, match="first token of a sample"):
        SequenceBatch(IDS, ok, None, torch.tensor([[0, 1, 0], [0, 1, 2]]))
    with pytest.raises(ValueError, match="padded position"):
        SequenceBatch(
            IDS, torch.tensor([[0, 1, 1], [0, 1, 1]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
        )


def test_a_completion_batch_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="from 0 to 3, but there are 1 prompts"):
        CompletionBatch.from_ids([[1]], [[2], [3]], [0, 3])
    with pytest.raises(ValueError, match="empty prompt"):
        CompletionBatch.from_ids([[]], [[2]], [0])
    with pytest.raises(ValueError, match=r"prompt_index has shape \[1\], wanted \[2\]"):
        CompletionBatch.from_ids([[1]], [[2], [3]], [0])
    with pytest.raises(ValueError, match="past completion_lengths"):
        CompletionBatch.from_ids([[1]], [[2], [3, 4]], [0, 0], score_mask=[[1, 1], [1, 1]])
    good = CompletionBatch.from_ids([[1]], [[2], [3, 4]], [0, 0])
    with pytest.raises(ValueError, match="completion_lengths runs from 1 to 3"):
        replace(good, completion_lengths=torch.tensor([1, 3]))


ids = st.lists(st.integers(1, 99), min_size=1, max_size=6)


@given(st.data(), st.lists(ids, min_size=1, max_size=4))
@settings(deadline=None, max_examples=50)
def test_rows_of_completions_hold_prompt_and_completion_side_by_side(data, prompts):
    rows = data.draw(st.lists(st.lists(st.integers(1, 99), max_size=6), min_size=1, max_size=6))
    index = data.draw(
        st.lists(st.integers(0, len(prompts) - 1), min_size=len(rows), max_size=len(rows))
    )
    batch = CompletionBatch.from_ids(prompts, rows, index, pad_token_id=7)
    whole = batch.as_sequences()
    for row, (prompt, completion) in enumerate(zip(index, rows, strict=True)):
        real = whole.attended()[row]
        assert whole.input_ids[row][real].tolist() == prompts[prompt] + completion
        assert whole.input_ids[row][whole.score_mask[row]].tolist() == completion


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    st.booleans(),
)
@settings(deadline=None, max_examples=50)
def test_samples_lists_each_packed_sample_once_in_order(lengths, left):
    width = max(map(sum, lengths))
    rows, positions, attended, expected, token = [], [], [], [], 10
    for row in lengths:
        tokens, places = [], []
        for length in row:
            expected.append(list(range(token, token + length)))
            tokens += expected[-1]
            places += range(length)
            token += length
        gap = [0] * (width - len(tokens))
        real = [1] * len(tokens)
        rows.append(gap + tokens if left else tokens + gap)
        positions.append(gap + places if left else places + gap)
        attended.append(gap + real if left else real + gap)
    rows, positions, attended = map(torch.tensor, (rows, positions, attended))
    batch = SequenceBatch(rows, (positions > 0) & attended.bool(), attended, positions)
    samples, place = batch.samples()
    found = [r[m].tolist() for r, m in zip(samples.input_ids, samples.attended(), strict=True)]
    assert found == expected
    assert torch.equal(samples.input_ids[place], rows[attended.bool()])
