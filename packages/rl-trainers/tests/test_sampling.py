"""Drawing tokens: the right distribution, and each row on its own."""

import pytest
import torch

from closeness import assert_close
from rl_trainers.rollouts.engine import SamplingParams
from rl_trainers.rollouts.sampling import row_uniforms, sample_tokens, truncate


def params(**changes):
    return SamplingParams(**{"max_new_tokens": 1, **changes})


def test_a_uniform_number_picks_the_token_whose_interval_holds_it():
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().expand(6, 4)
    uniforms = torch.tensor([0.0, 0.0999, 0.1001, 0.2999, 0.6001, 0.9999999])
    assert sample_tokens(logits, uniforms, params()).tolist() == [0, 0, 1, 1, 3, 3]


def test_temperature_reshapes_the_distribution():
    # At temperature 1/2 probabilities are squared: 1 : 4 instead of 1 : 2.
    logits = torch.tensor([[1.0, 2.0]]).log().expand(2, 2)
    uniforms = torch.tensor([0.19, 0.21])
    assert sample_tokens(logits, uniforms, params(temperature=0.5)).tolist() == [0, 1]


def test_temperature_zero_takes_the_likeliest():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert sample_tokens(logits, torch.tensor([0.0]), params(temperature=0)).tolist() == [1]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 2}, [0.0, 0.3, 0.0, 0.4]),
        ({"top_p": 0.8}, [0.0, 0.3, 0.2, 0.4]),
        ({"top_p": 0.7}, [0.0, 0.3, 0.0, 0.4]),
        ({"min_p": 0.6}, [0.0, 0.3, 0.0, 0.4]),
        ({"top_k": 3, "top_p": 0.5}, [0.0, 0.3, 0.0, 0.4]),
    ],
)
def test_truncation_keeps_what_it_says(changes, kept):
    probs = torch.tensor([[0.1, 0.3, 0.2, 0.4]], dtype=torch.float64)
    assert_close(truncate(probs, params(**changes)), [kept])


def test_no_token_of_probability_zero_is_ever_drawn():
    logits = torch.full((3, 5), -torch.inf)
    logits[:, 2] = 0.0
    uniforms = torch.tensor([0.0, 0.5, 1 - 1e-9])
    assert sample_tokens(logits, uniforms, params()).tolist() == [2, 2, 2]


def test_a_rows_numbers_do_not_depend_on_how_many_rows_there_are():
    assert torch.equal(row_uniforms(2, 7, seed=5), row_uniforms(9, 7, seed=5)[:2])
    assert not torch.equal(row_uniforms(1, 7, seed=5), row_uniforms(1, 7, seed=6))


@pytest.mark.parametrize(
    "changes", [{"top_p": 0.0}, {"min_p": 2.0}, {"temperature": -1.0}, {"max_new_tokens": 0}]
)
def test_a_setting_out_of_range_is_named(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name}=.*must be"):
        params(**changes)
