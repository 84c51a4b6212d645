from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ops import flush_left, flush_right, pad, pad_to_length

DTYPES = [torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.bool]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    rest=st.sampled_from([(), (2,), (2, 3)]),
    ragged=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    side=st.sampled_from(["left", "right"]),
    multiple=st.sampled_from([None, 1, 4]),
)
def test_every_number_is_in_its_place_and_the_rest_is_padding(
    lengths, rest, ragged, dtype, side, multiple
):
    tensors = [
        torch.randint(0, 2, (n, *(size + i * ragged for size in rest))).to(dtype)
        for i, n in enumerate(lengths)
    ]
    value = 1
    got = pad(tensors, value, side, multiple)
    longest = max(lengths)
    longest += -longest % (multiple or 1)
    assert got.shape[:2] == (len(lengths), longest)
    assert got.dtype == dtype
    for row, tensor in zip(got.tolist(), tensors, strict=True):
        start = longest - tensor.shape[0] if side == "left" else 0
        for t, item in enumerate(row):
            inside = start <= t < start + tensor.shape[0]
            part = tensor[t - start] if inside else tensor.new_empty((0, *tensor.shape[1:]))[:0]
            flat = torch.as_tensor(item, dtype=dtype)
            if inside:
                region = tuple(slice(size) for size in part.shape)
                assert torch.equal(flat[region] if region else flat, part)
                expected_ones = part.double().sum() + flat.numel() - part.numel()
                assert flat.double().sum() == expected_ones
            else:
                assert (flat.double() == value).all()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: pad([]), "empty list"),
        (lambda: pad([torch.zeros(1)], padding_side="top"), "padding_side is 'top'"),
        (lambda: pad([torch.zeros(1)], pad_to_multiple_of=0), "pad_to_multiple_of is 0"),
        (lambda: pad([torch.zeros(1), torch.zeros(1, 1)]), "tensor 1 has rank 2"),
        (lambda: pad([torch.zeros(1), torch.zeros(1).long()]), "torch.int64"),
        (lambda: pad([torch.tensor(1)]), "no dimension"),
        (lambda: pad_to_length(torch.zeros(1), -1), "length is -1"),
        (lambda: flush_left(torch.zeros(3)), r"pass \[rows, length\]"),
        (lambda: flush_left(torch.zeros(2, 3), torch.zeros(2, 2)), "tensor 0 has shape"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(call, said):
    with pytest.raises(ValueError, match=said) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_pad_to_length_pads_and_cuts_any_dimension():
    x = torch.tensor([[1, 2], [3, 4]])
    assert pad_to_length(x, 3, 9).tolist() == [[1, 2, 9], [3, 4, 9]]
    assert pad_to_length(x, 1).tolist() == [[1], [3]]
    assert pad_to_length(x, 3, 0, dim=0).tolist() == [[1, 2], [3, 4], [0, 0]]
    assert pad_to_length(x, 2) is not None
    assert pad_to_length(x, 0).shape == (2, 0)


def test_flushing_keeps_gaps_and_cuts_unused_columns():
    mask = torch.tensor([[0, 0, 1, 0, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    ids = torch.arange(15).view(3, 5)
    left, left_ids = flush_left(mask, ids)
    assert left.tolist() == [[1, 0, 1], [1, 1, 0], [0, 0, 0]]
    assert left_ids[left.bool()].tolist() == ids[mask.bool()].tolist()
    right, right_ids = flush_right(mask, ids)
    assert right.tolist() == [[1, 0, 1], [0, 1, 1], [0, 0, 0]]
    assert right_ids[right.bool()].tolist() == ids[mask.bool()].tolist()


def test_flushing_takes_wider_tensors_and_empty_ones():
    mask = torch.tensor([[0, 1]])
    hidden = torch.randn(1, 2, 3)
    _, moved = flush_left(mask, hidden)
    assert torch.equal(moved[:, 0], hidden[:, 1])
    assert flush_left(torch.zeros(2, 3)).shape == (2, 0)
    assert flush_right(torch.zeros(2, 0)).shape == (2, 0)
