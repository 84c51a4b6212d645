"""Policy-gradient losses. All return ``[B, T]`` except :func:`rloo`, which returns ``[B]``.

Common arguments: ``logps`` of the policy being trained, ``old_logps`` of the policy that sampled
(both ``[B, T]``), ``advantages`` ``[B]`` or ``[B, T]``, ``mask`` ``[B, T]`` (non-zero: trained).
Below, ``r_t = exp(logps - old_logps)`` and ``A`` is the advantage. Masked positions give exactly 0
in value and gradient, whatever they hold; an unmasked number that is not finite raises ValueError
with its row. Ratios above exp(40) grow linearly instead of overflowing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rl_ops.kl import bounded_exp, kl_estimate
from rl_ops.losses._inputs import masked_advantages, masked_inputs
from rl_ops.masked import masked_mean, zero_masked

__all__ = [
    "PolicyDiagnostics",
    "bnpo",
    "cispo",
    "dapo",
    "dr_grpo",
    "grpo",
    "gspo",
    "luspo",
    "policy_diagnostics",
    "ppo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "sapo",
    "vespo",
]


def grpo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
) -> Tensor:
    """Clipped surrogate ``-min(min(r_t, delta) * A, clip(r_t, 1 - epsilon, 1 + epsilon_high) * A)``.

    GRPO (Shao et al. 2024, arXiv:2402.03300, equation 3), averaged with "sequence_mean". A KL term
    is added by the caller with :func:`rl_ops.kl_estimate`.

    Args:
        logps: ``[B, T]``, the policy's.
        old_logps: ``[B, T]``, the sampling policy's.
        advantages: ``[B]`` or ``[B, T]``.
        mask: ``[B, T]``.
        epsilon: how far the ratio may fall below 1.
        epsilon_high: how far it may rise above 1; ``epsilon`` by default.
        delta: upper bound of the unclipped ratio, against huge losses at negative advantages
            (INTELLECT-2, arXiv:2505.07291, section 3.4); must exceed ``1 + epsilon_high``.

    Example:
        >>> zeros, mask = torch.zeros(1, 2), torch.tensor([[1, 0]])
        >>> grpo(zeros, zeros, torch.tensor([2.0]), mask)
        tensor([[-2.,  0.]])
    """
    return _clipped_surrogate(
        logps, old_logps, advantages, mask, bounds=_bounds(epsilon, epsilon_high, delta)
    )


def bnpo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
) -> Tensor:
    """The surrogate of :func:`grpo`, averaged over the tokens of the batch ("token_mean").

    BNPO (Xiao et al. 2025, arXiv:2506.02864) as the field uses the name; here the batch is the
    whole step.
    """
    return _clipped_surrogate(
        logps, old_logps, advantages, mask, bounds=_bounds(epsilon, epsilon_high, delta)
    )


def dr_grpo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
) -> Tensor:
    """The surrogate of :func:`grpo`, summed and divided by a constant ("constant"), with ``scale="none"`` advantages.

    Dr. GRPO (Liu et al. 2025, arXiv:2503.20783, section 3.2): neither length nor spread of a group
    biases the step.
    """
    return _clipped_surrogate(
        logps, old_logps, advantages, mask, bounds=_bounds(epsilon, epsilon_high, delta)
    )


def dapo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
) -> Tensor:
    """The surrogate of :func:`grpo`, averaged over all tokens of the step ("token_mean"); the paper clips at 0.28 above.

    DAPO (Yu et al. 2025, arXiv:2503.14476, equation 8).
    """
    return _clipped_surrogate(
        logps, old_logps, advantages, mask, bounds=_bounds(epsilon, epsilon_high, delta)
    )


def ppo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate, with the lower bound ``dual_clip * A`` where ``A < 0``.

    ``L = -min(r_t * A, clip(r_t, 1 - epsilon, 1 + epsilon_high) * A)`` (Schulman et al. 2017,
    arXiv:1707.06347, equation 7); where ``A < 0``, ``min(L, -dual_clip * A)`` (Ye et al. 2020,
    arXiv:1912.09729, equation 5).

    Args:
        logps: ``[B, T]``.
        old_logps: ``[B, T]``.
        advantages: ``[B, T]`` from :func:`rl_ops.generalized_advantages`, or ``[B]``.
        mask: ``[B, T]``.
        epsilon: how far the ratio may fall below 1.
        epsilon_high: how far it may rise above 1; ``epsilon`` by default.
        dual_clip: above 1, 3 in the paper; None leaves it out.
    """
    low, high, _ = _bounds(epsilon, epsilon_high, None)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip is {dual_clip}: pass a number above 1, or None")
    loss = _clipped_surrogate(logps, old_logps, advantages, mask, bounds=(low, high, None))
    if dual_clip is None:
        return loss
    advantages = masked_advantages(advantages, mask)
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def reinforce_pp(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Tensor:
    """REINFORCE++: the clipped surrogate with advantages normalised over the whole batch.

    ``-min(r_t * A_t, clip(r_t, 1 - epsilon, 1 + epsilon_high) * A_t)`` (Hu et al. 2025,
    arXiv:2501.03262), ``A_t`` from :func:`rl_ops.reinforce_pp_advantages`, which holds the KL
    penalty.
    """
    return _clipped_surrogate(
        logps, old_logps, advantages, mask, bounds=_bounds(epsilon, epsilon_high, None)
    )


def reinforce_pp_baseline(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_logps: Tensor | None = None,
    *,
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Tensor:
    """REINFORCE++-baseline: the clipped surrogate plus ``beta * k2``, the KL term in the loss.

    ``-min(r_t * A, clip(r_t) * A) + beta * (logps - ref_logps)**2 / 2`` (Hu et al. 2025,
    arXiv:2501.03262, section 3.3), ``A`` from :func:`rl_ops.reinforce_pp_baseline_advantages`.

    Raises:
        ValueError: ``beta`` without ``ref_logps``, or the other way round.
    """
    if (beta != 0.0) != (ref_logps is not None):
        raise ValueError(f"beta={beta} and ref_logps go together: pass both or neither")
    loss = _clipped_surrogate(
        logps, old_logps, advantages, mask, bounds=_bounds(epsilon, epsilon_high, None)
    )
    if ref_logps is None:
        return loss
    return loss + beta * kl_estimate(logps, ref_logps, "k2", mask=mask)


def cispo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon_high: float = 5.0,
    epsilon_low: float | None = None,
) -> Tensor:
    """Clipped importance weights on REINFORCE: ``-sg(clip(r_t, epsilon_low, epsilon_high)) * A * logps``.

    CISPO (MiniMax-M1 2025, arXiv:2506.13585, equations 4 and 5); averaged with "token_mean". The
    bounds are on the ratio itself (not around 1), as ScaleRL (arXiv:2510.13786) and TRL have them;
    no lower one by default.
    """
    logps, old_logps = masked_inputs(mask, logps=logps, old_logps=old_logps)
    advantages = masked_advantages(advantages, mask)
    weight = bounded_exp(logps.detach() - old_logps).clamp(epsilon_low, epsilon_high)
    return -weight * advantages * logps


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
    return _surrogate(ratio, advantages, _bounds(epsilon, epsilon_high, None))


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


def sapo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    temperature_pos: float = 1.0,
    temperature_neg: float = 1.05,
) -> Tensor:
    """A soft gate in place of the clip: ``-(4 / tau) * sigmoid(tau * (r_t - 1)) * A``.

    SAPO (Gao et al. 2025, arXiv:2511.20347, equations 5 and 6); ``tau`` is ``temperature_pos``
    where ``A > 0`` and ``temperature_neg`` elsewhere; averaged with "sequence_mean".
    """
    if min(temperature_pos, temperature_neg) <= 0:
        raise ValueError(
            f"temperatures are {temperature_pos}, {temperature_neg}: pass positive ones"
        )
    logps, old_logps = masked_inputs(mask, logps=logps, old_logps=old_logps)
    advantages = masked_advantages(advantages, mask)
    tau = torch.where(advantages > 0, temperature_pos, temperature_neg)
    ratio = bounded_exp(logps - old_logps)
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages


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
    k = torch.where(positive, k_pos, k_neg)
    lam = torch.where(positive, lambda_pos, lambda_neg)
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
    """The clipped surrogate on whole sequences: ``-min(R * A, clip(R) * A)``, ``R = exp(sum_t(logps - old_logps))``.

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
    return _surrogate(ratio, advantages, _bounds(epsilon, epsilon_high, None))


class PolicyDiagnostics(NamedTuple):
    """Scalars without gradient, over unmasked tokens; 0 (ratios 1) where there are none."""

    ratio_mean: Tensor
    ratio_min: Tensor
    ratio_max: Tensor
    clip_fraction_low: Tensor
    clip_fraction_high: Tensor
    approx_kl: Tensor


@torch.no_grad()
def policy_diagnostics(
    logps: Tensor,
    old_logps: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    advantages: Tensor | None = None,
) -> PolicyDiagnostics:
    """Return how far the policy has moved from the one that sampled.

    Args:
        logps: ``[B, T]``.
        old_logps: ``[B, T]``.
        mask: ``[B, T]``.
        epsilon: as in the loss.
        epsilon_high: as in the loss.
        advantages: ``[B]`` or ``[B, T]``. With them a token counts as clipped only where the clip
            stops its
            gradient: low with ``A < 0``, high with ``A > 0``.

    Returns:
        Mean, least and largest ratio, the fraction of tokens below and above the clip range, and
        the k3 estimate of KL(old || new).
    """
    low, high, _ = _bounds(epsilon, epsilon_high, None)
    logps, old_logps = masked_inputs(mask, logps=logps, old_logps=old_logps)
    used = mask.bool()
    ratio = bounded_exp(logps - old_logps)
    below, above = ratio < low, ratio > high
    if advantages is not None:
        advantages = masked_advantages(advantages, mask)
        below, above = below & (advantages < 0), above & (advantages > 0)
    ones = ratio.new_ones(1)
    return PolicyDiagnostics(
        ratio_mean=masked_mean(ratio, used) if bool(used.any()) else ones[0],
        ratio_min=torch.cat([ratio[used], ones]).min() if not used.any() else ratio[used].min(),
        ratio_max=torch.cat([ratio[used], ones]).max() if not used.any() else ratio[used].max(),
        clip_fraction_low=masked_mean(below.to(ratio.dtype), used),
        clip_fraction_high=masked_mean(above.to(ratio.dtype), used),
        approx_kl=masked_mean(kl_estimate(old_logps, logps, "k3"), used),
    )


Bounds = tuple[float, float, float | None]


def _bounds(epsilon: float, epsilon_high: float | None, delta: float | None) -> Bounds:
    """Return the clip range of the ratio and the bound of the unclipped one."""
    high = epsilon if epsilon_high is None else epsilon_high
    if epsilon < 0 or high < 0:
        raise ValueError(f"epsilon={epsilon}, epsilon_high={high}: pass 0 or more")
    if delta is not None and delta <= 1 + high:
        raise ValueError(
            f"delta={delta} must exceed 1 + epsilon_high = {1 + high}, or the clip never acts"
        )
    return 1 - epsilon, 1 + high, delta


def _clipped_surrogate(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, bounds: Bounds
) -> Tensor:
    logps, old_logps = masked_inputs(mask, logps=logps, old_logps=old_logps)
    advantages = masked_advantages(advantages, mask)
    return _surrogate(bounded_exp(logps - old_logps), advantages, bounds)


def _surrogate(ratio: Tensor, advantages: Tensor, bounds: Bounds) -> Tensor:
    low, high, delta = bounds
    clipped = ratio.clamp(low, high) * advantages
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    return 0 - torch.minimum(ratio * advantages, clipped)


def _sequence_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """Return ``sg(exp(mean log-ratio)) * exp(logps - sg(logps))``, ``[B, T]``."""
    length = mask.bool().sum(-1, keepdim=True).clamp(min=1)
    mean = (logps.detach() - old_logps).sum(-1, keepdim=True) / length
    return zero_masked(bounded_exp(mean) * torch.exp(logps - logps.detach()), mask)
