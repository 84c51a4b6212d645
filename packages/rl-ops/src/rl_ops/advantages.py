"""Advantages from rewards: by group, leaving one out, over a batch, by a value function."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rl_ops.masked import require_finite, zero_masked

__all__ = [
    "GroupCounts",
    "ReturnsAndAdvantages",
    "generalized_advantages",
    "group_advantages",
    "group_counts",
    "leave_one_out_advantages",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
]


class GroupCounts(NamedTuple):
    """What the rewards of a batch cannot teach, to be logged."""

    not_scorable: int
    groups_without_signal: int
    groups: int


class ReturnsAndAdvantages(NamedTuple):
    """Advantages and the returns that a value function is fitted to, both ``[B, T]``."""

    advantages: Tensor
    returns: Tensor


def group_advantages(
    rewards: Tensor, group_size: int, scale: str = "group", eps: float = 1e-4
) -> Tensor:
    """Return ``(reward - mean of its group) / (std + eps)``.

    GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2); ``scale="none"`` is Dr. GRPO (Liu et
    al. 2025, arXiv:2503.20783); ``scale="batch"`` takes one std over all rewards (Hu et al. 2025,
    arXiv:2508.08221).

    Args:
        rewards: ``[N]``, the rows of a group beside each other. NaN marks a row that could not be
            scored: it is left out of mean and std and its advantage is 0.
        group_size: rows a group; N must be a multiple of it.
        scale: "group", "batch" or "none".
        eps: added to the std (with Bessel's correction).

    Returns:
        ``[N]`` float32 (float64 for float64). Exactly 0 for a group of equal rewards, for a group
        with one scorable row, and for rows that are not scorable.

    Raises:
        ValueError: N is no multiple of the group size, an infinite reward, an unknown scale.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), 2, scale="none")
        tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """
    groups, scorable = _groups(rewards, group_size)
    centred = _centre(groups, scorable)
    if scale == "group":
        centred = centred / (_std(centred, scorable, dim=1) + eps)
    elif scale == "batch":
        overall = _centre(groups.view(1, -1), scorable.view(1, -1))
        centred = centred / (_std(overall, scorable.view(1, -1), dim=1) + eps)
    elif scale != "none":
        raise ValueError(f'scale is {scale!r}: pass "group", "batch" or "none"')
    return _result(centred, rewards)


def leave_one_out_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Return each reward minus the mean of the others in its group.

    RLOO (Ahmadian et al. 2024, arXiv:2402.14740, equation 6). NaN as in :func:`group_advantages`.

    Example:
        >>> leave_one_out_advantages(torch.tensor([1.0, 0.0, 0.0]), 3)
        tensor([ 1.0000, -0.5000, -0.5000])
    """
    groups, scorable = _groups(rewards, group_size)
    count = scorable.sum(1, keepdim=True)
    # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
    factor = count / (count - 1).clamp(min=1)
    return _result(_centre(groups, scorable) * factor, rewards)


def group_counts(rewards: Tensor, group_size: int) -> GroupCounts:
    """Count the rows that are not scorable and the groups whose advantages are all zero.

    Example:
        >>> group_counts(torch.tensor([1.0, float("nan"), 0.0, 1.0]), 2)
        GroupCounts(not_scorable=1, groups_without_signal=1, groups=2)
    """
    groups, scorable = _groups(rewards, group_size)
    flat = (_centre(groups, scorable) == 0).all(1)
    return GroupCounts(int((~scorable).sum()), int(flat.sum()), groups.shape[0])


def reinforce_pp_advantages(
    rewards: Tensor, kl: Tensor, mask: Tensor, *, beta: float, gamma: float = 1.0, eps: float = 1e-8
) -> Tensor:
    """Return REINFORCE++ advantages: reward at the last token, KL at each, then normalised.

    ``A_t = sum_{s >= t} gamma**(s - t) * (1[s = last] * reward - beta * kl_s)``, then whitened over
    all unmasked tokens (Hu et al. 2025, arXiv:2501.03262, equations 8 to 10).

    Args:
        rewards: ``[B]``; NaN marks a row that is not scorable: left out of the normalisation,
            advantage 0.
        kl: per-token estimates ``[B, T]``.
        mask: ``[B, T]``.
        beta: weight of the KL penalty.
        gamma: discount.
        eps: added to the variance.
    """
    scorable = ~rewards.isnan()
    used = mask.bool() & scorable[:, None]
    require_finite("kl", kl, used)
    kl = zero_masked(_wide(kl), used)
    last = used & (used.flip(1).to(torch.int64).cumsum(1).flip(1) == 1)
    step = torch.where(last, torch.where(scorable, _wide(rewards), 0)[:, None], 0) - beta * kl
    carry, returns = step.new_zeros(step.shape[0]), []
    for t in reversed(range(step.shape[1])):
        carry = torch.where(used[:, t], step[:, t] + gamma * carry, carry)
        returns.append(carry)
    total = torch.stack(returns[::-1], 1) if returns else step
    return _normalise(total, used, eps).to(_wide(rewards, torch.float32).dtype)


def reinforce_pp_baseline_advantages(
    rewards: Tensor, group_size: int, *, eps: float = 1e-8
) -> Tensor:
    """Return REINFORCE++-baseline advantages: minus the group's mean, then normalised.

    Hu et al. 2025 (arXiv:2501.03262, equations 11 and 12). NaN as in :func:`group_advantages`.

    Example:
        >>> reinforce_pp_baseline_advantages(torch.tensor([1.0, 0.0]), 2)
        tensor([ 0.7071, -0.7071])
    """
    groups, scorable = _groups(rewards, group_size)
    return _result(_normalise(_centre(groups, scorable), scorable, eps), rewards)


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    last_values: Tensor | None = None,
) -> ReturnsAndAdvantages:
    """Return generalised advantage estimates and the returns ``advantages + values``.

    ``delta_t = r_t + gamma * V_{t+1} - V_t`` and ``A_t = delta_t + gamma * lam * A_{t+1}``
    (Schulman et al. 2016, arXiv:1506.02438, equation 16), t running over the unmasked positions of
    a row: tool tokens in the middle are stepped over, padding on either side is inert.

    Args:
        rewards: ``[B, T]``.
        values: ``[B, T]``, the value before each token.
        mask: ``[B, T]``.
        gamma: discount.
        lam: 0 trusts the values, 1 the rewards.
        last_values: ``[B]``, the value after the last token of rows cut at a limit; 0 (ended) by
            default.

    Returns:
        Both ``[B, T]``, exactly 0 where masked.

    Example:
        >>> rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
        >>> generalized_advantages(rewards, values, torch.ones(1, 2), lam=1.0).advantages
        tensor([[0.5000, 0.5000]])
    """
    used = mask.bool()
    require_finite("rewards", rewards, used)
    require_finite("values", values, used)
    rewards, values = zero_masked(rewards, used), zero_masked(values, used)
    advantage = values.new_zeros(values.shape[0])
    next_value = advantage if last_values is None else last_values.to(values.dtype)
    steps = []
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(used[:, t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(used[:, t], values[:, t], next_value)
        steps.append(advantage)
    advantages = zero_masked(torch.stack(steps[::-1], 1) if steps else values, used)
    return ReturnsAndAdvantages(advantages, zero_masked(advantages + values, used))


def _groups(rewards: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return the rewards as float64 ``[G, group_size]`` with 0 for NaN, and which are scorable."""
    if rewards.dim() != 1 or group_size < 1 or rewards.numel() % group_size:
        raise ValueError(
            f"rewards of shape {list(rewards.shape)} do not split into groups of {group_size}: "
            "pass [groups * group_size]"
        )
    scorable = ~rewards.isnan() if rewards.is_floating_point() else torch.ones_like(rewards).bool()
    require_finite("rewards", rewards, scorable)
    wide = torch.where(scorable, _wide(rewards), 0.0)
    return wide.view(-1, group_size), scorable.view(-1, group_size)


def _wide(values: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return ``values`` in float64 (MPS has none) or ``dtype``; float64 stays."""
    if values.device.type == "mps":
        return values.float()
    return values if values.dtype == torch.float64 else values.to(dtype)


def _centre(groups: Tensor, scorable: Tensor) -> Tensor:
    """Subtract each row's mean; exactly 0 where all scorable entries are equal."""
    count = scorable.sum(1, keepdim=True).clamp(min=1)
    mean = groups.sum(1, keepdim=True) / count
    top = groups.masked_fill(~scorable, -torch.inf).amax(1, keepdim=True)
    bottom = groups.masked_fill(~scorable, torch.inf).amin(1, keepdim=True)
    return zero_masked(groups - mean, scorable & (top > bottom))


def _std(centred: Tensor, scorable: Tensor, *, dim: int) -> Tensor:
    free = (scorable.sum(dim, keepdim=True) - 1).clamp(min=1)
    return (centred.square().sum(dim, keepdim=True) / free).sqrt()


def _normalise(values: Tensor, used: Tensor, eps: float) -> Tensor:
    """Whiten over the used entries; a constant batch gives zeros."""
    centred = _centre(values.reshape(1, -1), used.reshape(1, -1))
    free = (used.sum() - 1).clamp(min=1)
    return (centred * torch.rsqrt(centred.square().sum() / free + eps)).view(values.shape)


def _result(values: Tensor, rewards: Tensor) -> Tensor:
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    return values.reshape(-1).to(dtype)
