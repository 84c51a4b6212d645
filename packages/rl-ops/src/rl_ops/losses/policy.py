"""Policy-gradient losses. All return ``[B, T]``.

Common arguments: ``logps`` of the policy being trained, ``old_logps`` of the policy that sampled
(both ``[B, T]``), ``advantages`` ``[B]`` or ``[B, T]``, ``mask`` ``[B, T]`` (non-zero: trained).
Below, ``r_t = exp(logps - old_logps)`` and ``A`` is the advantage. Masked positions give exactly 0
in value and gradient, whatever they hold; an unmasked number that is not finite raises ValueError
with its row. Ratios above exp(40) grow linearly instead of overflowing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_ops.kl import bounded_exp, kl_estimate
from rl_ops.losses._inputs import masked_advantages, masked_inputs
from rl_ops.losses._surrogate import Bounds, bounds_of, surrogate

__all__ = [
    "bnpo",
    "cispo",
    "dapo",
    "dr_grpo",
    "grpo",
    "ppo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "sapo",
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
    """Clipped surrogate.

    ``-min(min(r_t, delta) * A, clip(r_t, 1 - epsilon, 1 + epsilon_high) * A)``.

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
        logps, old_logps, advantages, mask, bounds=bounds_of(epsilon, epsilon_high, delta)
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
        logps, old_logps, advantages, mask, bounds=bounds_of(epsilon, epsilon_high, delta)
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
    """The surrogate of :func:`grpo`, summed and divided by a constant ("constant").

    Its advantages are those of ``scale="none"``.

    Dr. GRPO (Liu et al. 2025, arXiv:2503.20783, section 3.2): neither length nor spread of a group
    biases the step.
    """
    return _clipped_surrogate(
        logps, old_logps, advantages, mask, bounds=bounds_of(epsilon, epsilon_high, delta)
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
    """The surrogate of :func:`grpo`, averaged over all tokens of the step ("token_mean").

    The paper has ``epsilon_high=0.28``.

    DAPO (Yu et al. 2025, arXiv:2503.14476, equation 8).
    """
    return _clipped_surrogate(
        logps, old_logps, advantages, mask, bounds=bounds_of(epsilon, epsilon_high, delta)
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
    low, high, _ = bounds_of(epsilon, epsilon_high, None)
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
        logps, old_logps, advantages, mask, bounds=bounds_of(epsilon, epsilon_high, None)
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
        logps, old_logps, advantages, mask, bounds=bounds_of(epsilon, epsilon_high, None)
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
    """REINFORCE with clipped weights: ``-sg(clip(r_t, epsilon_low, epsilon_high)) * A * logps``.

    CISPO (MiniMax-M1 2025, arXiv:2506.13585, equations 4 and 5); averaged with "token_mean". The
    bounds are on the ratio itself (not around 1), as ScaleRL (arXiv:2510.13786) and TRL have them;
    no lower one by default.
    """
    logps, old_logps = masked_inputs(mask, logps=logps, old_logps=old_logps)
    advantages = masked_advantages(advantages, mask)
    weight = bounded_exp(logps.detach() - old_logps).clamp(epsilon_low, epsilon_high)
    return -weight * advantages * logps


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
    tau = torch.full_like(advantages, temperature_neg).masked_fill(advantages > 0, temperature_pos)
    ratio = bounded_exp(logps - old_logps)
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages


def _clipped_surrogate(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, bounds: Bounds
) -> Tensor:
    logps, old_logps = masked_inputs(mask, logps=logps, old_logps=old_logps)
    advantages = masked_advantages(advantages, mask)
    return surrogate(bounded_exp(logps - old_logps), advantages, bounds)
