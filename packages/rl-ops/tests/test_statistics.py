"""Masked statistics, advantages, KL and the reduction of losses."""

from __future__ import annotations

import doctest
import importlib
import math
import pkgutil

import pytest
import torch

import rl_ops
from closeness import assert_close
from rl_ops import (
    generalized_advantages,
    group_advantages,
    group_counts,
    kl_estimate,
    leave_one_out_advantages,
    masked_mean,
    masked_var,
    masked_whiten,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
)
from rl_ops.losses import loss_denominator, nll, reduce_loss

NAN = math.nan
MODULES = [
    m.name for m in pkgutil.walk_packages(rl_ops.__path__, "rl_ops.") if "triton" not in m.name
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_docstrings_are_true(name):
    module = importlib.import_module(name)
    found = doctest.testmod(
        module, extraglobs={"torch": torch}, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert found.failed == 0


def test_masked_statistics_are_those_of_the_unmasked_values():
    values = torch.tensor([[1.0, 2.0, NAN], [4.0, math.inf, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    kept = torch.tensor([1.0, 2.0, 4.0, 9.0])
    assert_close(masked_mean(values, mask), 4.0)
    assert_close(masked_mean(values, mask, dim=1), [1.5, 6.5])
    assert_close(masked_var(values, mask), kept.var())
    assert_close(masked_var(values, mask, unbiased=False), kept.var(unbiased=False))
    assert_close(masked_var(values, mask, dim=-1), [0.5, 12.5])
    white = masked_whiten(values, mask)
    assert_close(white[mask.bool()], (kept - 4) / kept.std())
    assert_close(white[~mask.bool()], [0.0, 0.0])
    assert_close(masked_whiten(values, mask, shift_mean=False)[0, 0], 4 - 3 / kept.std())


def test_masked_statistics_without_enough_values():
    values = torch.tensor([1.0, 2.0])
    assert_close(masked_mean(values, torch.zeros(2)), 0.0)
    with pytest.raises(ValueError, match="at least 2 are needed"):
        masked_var(values, torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="does not broadcast"):
        masked_mean(values, torch.zeros(3))


def test_masked_mean_has_no_gradient_where_masked():
    values = torch.tensor([1.0, NAN], requires_grad=True)
    masked_mean(values, torch.tensor([1, 0])).backward()
    assert_close(values.grad, [1.0, 0.0])


def test_scale_of_group_batch_and_none():
    """E4."""
    rewards = torch.tensor([1.0, 0.0, 4.0, 0.0])
    assert_close(group_advantages(rewards, 2, "none"), [0.5, -0.5, 2.0, -2.0])
    by_group = [0.5 / (math.sqrt(0.5) + 1e-4), 2.0 / (math.sqrt(8.0) + 1e-4)]
    wanted = [by_group[0], -by_group[0], by_group[1], -by_group[1]]
    assert_close(group_advantages(rewards, 2), wanted)
    std = float(rewards.std()) + 1e-4
    assert_close(group_advantages(rewards, 2, "batch"), [0.5 / std, -0.5 / std, 2 / std, -2 / std])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.3, -7.7])
def test_equal_rewards_give_exactly_zero(scale, value):
    """E4: whatever the mean of equal numbers is rounded to."""
    rewards = torch.tensor([value] * 7 + [0.0, 1.0] + [0.5] * 5)
    advantages = group_advantages(rewards, 7, scale)
    assert torch.equal(advantages[:7], torch.zeros(7))
    assert (advantages[7:9] != 0).all()


def test_rows_that_are_not_scorable_are_left_out():
    """E2, E12: NaN, a group of one left, a whole group without."""
    rewards = torch.tensor([1.0, NAN, 0.0, NAN, NAN, 5.0, NAN, NAN, NAN])
    for scale in ("group", "batch", "none"):
        advantages = group_advantages(rewards, 3, scale)
        assert advantages.isfinite().all()
        assert torch.equal(advantages[[1, 3, 4, 5, 6, 7, 8]], torch.zeros(7))
        assert_close(advantages[0], -advantages[2])
    assert_close(group_advantages(rewards, 3)[0], 0.5 / (math.sqrt(0.5) + 1e-4))
    assert group_counts(rewards, 3) == (6, 2, 3)
    assert_close(leave_one_out_advantages(rewards, 3), [1.0, 0, -1.0, 0, 0, 0, 0, 0, 0])
    assert reinforce_pp_baseline_advantages(rewards, 3).isfinite().all()


def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others():
    rewards = torch.tensor([1.0, 2.0, 6.0])
    assert_close(leave_one_out_advantages(rewards, 3), [1 - 4.0, 2 - 3.5, 6 - 1.5])
    assert_close(leave_one_out_advantages(torch.ones(2), 1), [0.0, 0.0])


def test_advantages_refuse_what_is_no_group():
    for bad in (torch.zeros(5), torch.zeros(2, 2)):
        with pytest.raises(ValueError, match="groups of 2"):
            group_advantages(bad, 2)
    with pytest.raises(ValueError, match="rewards is inf at row 1"):
        group_advantages(torch.tensor([0.0, math.inf]), 2)
    with pytest.raises(ValueError, match='"group", "batch" or "none"'):
        group_advantages(torch.zeros(2), 2, scale="rows")


def test_generalised_advantages_by_hand():
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.2, 0.4]])
    got = generalized_advantages(rewards, values, torch.ones(1, 2), gamma=0.5, lam=0.5)
    last = 1 - 0.4
    first = 0.5 * 0.4 - 0.2 + 0.25 * last
    assert_close(got.advantages, [[first, last]])
    assert_close(got.returns, [[first + 0.2, 1.0]])
    cut = generalized_advantages(
        rewards, values, torch.ones(1, 2), gamma=0.5, lam=0.0, last_values=torch.tensor([2.0])
    )
    assert_close(cut.advantages[0, 1], 1 + 0.5 * 2 - 0.4)


def test_generalised_advantages_step_over_masked_tokens():
    """Tool tokens in the middle and padding at both ends change nothing, whatever they hold."""
    mask = torch.tensor([[0, 1, 0, 0, 1, 0]])
    rewards = torch.full((1, 6), NAN).masked_scatter(mask.bool(), torch.tensor([0.0, 1.0]))
    values = torch.full((1, 6), NAN).masked_scatter(mask.bool(), torch.tensor([0.2, 0.4]))
    got = generalized_advantages(rewards, values, mask, gamma=0.5, lam=0.5)
    dense = generalized_advantages(
        torch.tensor([[0.0, 1.0]]), torch.tensor([[0.2, 0.4]]), torch.ones(1, 2), gamma=0.5, lam=0.5
    )
    assert_close(got.advantages[mask.bool()], dense.advantages[0])
    assert_close(got.advantages[~mask.bool()], torch.zeros(4))
    assert_close(got.returns[~mask.bool()], torch.zeros(4))


def test_reinforce_pp_puts_the_reward_at_the_last_token_and_kl_at_each():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    kl = torch.tensor([[0.1, 0.2, NAN], [0.0, 0.0, 0.0]])
    got = reinforce_pp_advantages(torch.tensor([1.0, 0.0]), kl, mask, beta=0.5)
    raw = torch.tensor([1 - 0.05 - 0.1, 1 - 0.1, 0.0, 0.0, 0.0])
    assert_close(got[mask.bool()], (raw - raw.mean()) / raw.std(), atol=1e-5)
    skipped = reinforce_pp_advantages(torch.tensor([1.0, NAN]), kl, mask, beta=0.5)
    assert torch.equal(skipped[1], torch.zeros(3))


def test_kl_estimates_by_hand():
    logps, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    d = ref - logps
    assert_close(kl_estimate(logps, ref, "k1"), -d)
    assert_close(kl_estimate(logps, ref, "k2"), d**2 / 2)
    assert_close(kl_estimate(logps, ref, "k3"), d.exp() - 1 - d)
    assert_close(kl_estimate(logps, logps + 1e-6, "k3"), [0.0, 0.0], atol=1e-11)
    with pytest.raises(ValueError, match='"k1", "k2" or "k3"'):
        kl_estimate(logps, ref, "k4")


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 200.0), (torch.float16, 20.0)])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_of_far_apart_models_is_finite_and_points_the_right_way(dtype, gap, kind):
    """A7."""
    logps = torch.tensor([-gap], dtype=dtype, requires_grad=True)
    value = kl_estimate(logps, torch.zeros(1, dtype=dtype), kind)
    value.sum().backward()
    assert value.dtype == torch.float32
    assert value.isfinite().all()
    assert logps.grad.float().isfinite().all() or dtype == torch.float16
    assert (logps.grad > 0).all() if kind == "k1" else (logps.grad < 0).all()


def test_kl_beyond_the_mask_is_inert():
    logps = torch.tensor([-1.0, NAN], requires_grad=True)
    value = kl_estimate(logps, torch.tensor([-2.0, 1.0]), mask=torch.tensor([1, 0]))
    value.sum().backward()
    assert_close(value, [math.exp(-1), 0.0])
    assert_close(logps.grad, [1 - math.exp(-1), 0.0])
    with pytest.raises(ValueError, match="logps is nan at row 1"):
        kl_estimate(logps, torch.zeros(2))


VALUES = torch.tensor([[1.0, 3.0, NAN], [5.0, NAN, NAN], [NAN, NAN, NAN]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("token_mean", 9 / 3),
        ("sequence_mean", (2 + 5) / 2),
        ("sequence_mean_token_sum", 9 / 2),
        ("constant", 9 / (2 * 10)),
    ],
)
def test_each_mode_by_hand(mode, wanted):
    """C9: the row that is masked away is counted nowhere."""
    longest = 10 if mode == "constant" else None
    total = loss_denominator(MASK, mode=mode, max_length=longest)
    assert_close(reduce_loss(VALUES, MASK, mode=mode, denominator=total), wanted)


def test_a_rollout_split_in_two_rows_counts_once():
    """A9: three tokens in one row, or in rows of one and two that share a weight of 1."""
    logps = torch.tensor([[-1.0, -2.0, -6.0], [-4.0, -4.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    total = loss_denominator(mask, mode="sequence_mean")
    whole = reduce_loss(nll(logps, mask), mask, mode="sequence_mean", denominator=total)
    rows = torch.tensor([[-1.0, 0.0, 0.0], [-2.0, -6.0, 0.0], [-4.0, -4.0, 0.0]])
    row_mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 0]])
    weight = torch.tensor([1 / 3, 2 / 3, 1.0])
    parts = loss_denominator(row_mask, mode="sequence_mean", sequence_weight=weight)
    assert_close(parts, 2.0)
    split = reduce_loss(
        nll(rows, row_mask),
        row_mask,
        mode="sequence_mean",
        denominator=parts,
        sequence_weight=weight,
    )
    assert_close(split, whole)


def test_rows_of_3_and_30_tokens_weigh_the_same_however_they_are_split():
    """A4 on the reduction alone; the table of losses has it for every loss."""
    values = torch.rand(2, 30, dtype=torch.float64)
    mask = torch.arange(30) < torch.tensor([[3], [30]])
    for mode in ("token_mean", "sequence_mean", "sequence_mean_token_sum"):
        total = sum(loss_denominator(mask[i : i + 1], mode=mode) for i in range(2))
        parts = [
            reduce_loss(values[i : i + 1], mask[i : i + 1], mode=mode, denominator=total)
            for i in range(2)
        ]
        assert_close(sum(parts), reduce_loss(values, mask, mode=mode, denominator=total))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: loss_denominator(MASK, mode="mean"), "mode is 'mean'"),
        (lambda: loss_denominator(MASK, mode="constant"), "max_length"),
        (lambda: loss_denominator(MASK, mode="token_mean", max_length=3), "max_length"),
        (lambda: reduce_loss(VALUES, MASK, mode="token_mean", denominator=0), "no token"),
        (lambda: reduce_loss(VALUES, MASK[:2], mode="token_mean", denominator=1), "both as"),
        (
            lambda: reduce_loss(VALUES, 1 - MASK, mode="token_mean", denominator=1),
            "loss is nan at row 0",
        ),
        (
            lambda: loss_denominator(MASK, mode="token_mean", sequence_weight=torch.ones(2)),
            "one a row",
        ),
    ],
)
def test_reduction_refuses_what_cannot_be_meant(call, said):
    with pytest.raises(ValueError, match=said):
        call()
