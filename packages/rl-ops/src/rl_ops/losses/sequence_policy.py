"""Policy-gradient losses whose ratio is that of the whole sequence.

Arguments and rules as in :mod:`rl_ops.losses.policy`. All return ``[B, T]`` except :func:`rloo`,
which returns ``[B]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_ops.kl import bounded_exp
from rl_ops.losses._inputs import masked_advantages, masked_inputs
from rl_ops.losses._surrogate import bounds_of, surrogate
from rl_ops.masked import zero_masked

__all__ = ["gspo", "luspo", "rloo", "vespo"]


def gspo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 3e-4,
    epsilon_high: float | None = 4e-4,
) -> Tensor:
    """The clipped surrogate with one ratio a sequence, ``s = exp(mean_t(logps - old_logps))``.

    GSPO (Zheng et al. 2025, arXiv:2507.18071, equations 5 to 7); averaged with "sequence_mean".
    Written in its token form (equation 14), ``s_t = sg(s) * exp(logps - sg(logps))``: the same
    value and gradient for advantages ``[B]``, and defined for ``[B, T]`` too. The bounds are the
    paper's, far tighter than those of a token ratio.
    """
    logps, old_logps = masked_inputs(mask, logps=logps, old_logps=old_logps)
    advantages = masked_advantages(advantages, mask)
    ratio = _sequence_ratio(logps, old_logps, mask)
    return surrogate(ratio, advantages, bounds_of(epsilon, epsilon_high, None))


def luspo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 3e-4,
    epsilon_high: float | None = 4e-4,
) -> Tensor:
    """:func:`gspo` scaled by the length of each sequence: averaged with "sequence_mean_token_sum".

    ``-|y| * min(s * A, clip(s) * A)`` a sequence (LUSPO, Liu et al. 2026, arXiv:2602.05261):
    without the length, GSPO weighs the tokens of short answers more.
    """
    return gspo(logps, old_logps, advantages, mask, epsilon=epsilon, epsilon_high=epsilon_high)


def vespo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """A smooth sequence weight on REINFORCE: ``-phi(w) * A * logps``, ``phi`` without gradient.

    ``w = exp(sum_t(logps - old_logps))``, ``phi(w) = exp(lambda) * w**k * exp(-lambda * w)``, so
    that ``phi(1) = 1`` (VESPO, Shen et al. 2026, arXiv:2602.10693); ``k`` and ``lambda`` by the
    advantage's sign; averaged with "token_mean". Computed in log space, ``log w`` kept within [log
    1e-8, 20], where ``phi`` is 0 either way.
    """
    logps, old_logps = masked_inputs(mask, logps=logps, old_logps=old_logps)
    advantages = masked_advantages(advantages, mask)
    token = (logps.detach() - old_logps).clamp(-20.0, 20.0)
    log_w = token.sum(-1, keepdim=True).clamp(-18.420680743952367, 20.0)
    positive = advantages >= 0
    k = torch.full_like(advantages, k_neg).masked_fill(positive, k_pos)
    lam = torch.full_like(advantages, lambda_neg).masked_fill(positive, lambda_pos)
    phi = torch.exp(lam + k * log_w - lam * log_w.exp())
    return -phi * advantages * logps


def rloo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Tensor:
    """The clipped surrogate on whole sequences.

    ``-min(R * A, clip(R) * A)``, ``R = exp(sum_t(logps - old_logps))``.

    RLOO (Ahmadian et al. 2024, arXiv:2402.14740): a sequence is one action; on fresh samples its
    gradient is REINFORCE's with :func:`rl_ops.leave_one_out_advantages`.

    Args:
        logps: ``[B, T]``.
        old_logps: ``[B, T]``.
        advantages: ``[B]``.
        mask: ``[B, T]``.
        epsilon: how far the ratio may fall below 1.
        epsilon_high: how far it may rise above 1; ``epsilon`` by default.

    Returns:
        ``[B]``, 0 for rows without an unmasked token.
    """
    logps, old_logps = masked_inputs(mask, logps=logps, old_logps=old_logps)
    any_token = mask.bool().any(-1)
    if advantages.shape != any_token.shape:
        raise ValueError(
            f"advantages have shape {list(advantages.shape)}: rloo takes one a row, [B]"
        )
    advantages = masked_advantages(advantages.unsqueeze(-1), any_token.unsqueeze(-1)).squeeze(-1)
    ratio = bounded_exp((logps - old_logps).sum(-1))
    return surrogate(ratio, advantages, bounds_of(epsilon, epsilon_high, None))


def _sequence_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """Return ``sg(exp(mean log-ratio)) * exp(logps - sg(logps))``, ``[B, T]``."""
    length = mask.bool().sum(-1, keepdim=True).clamp(min=1)
    mean = (logps.detach() - old_logps).sum(-1, keepdim=True) / length
    return zero_masked(bounded_exp(mean) * torch.exp(logps - logps.detach()), mask)
