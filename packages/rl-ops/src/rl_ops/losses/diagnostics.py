"""How far the policy has moved from the one that sampled."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rl_ops.kl import bounded_exp, kl_estimate
from rl_ops.losses._inputs import masked_advantages, masked_inputs
from rl_ops.losses._surrogate import bounds_of
from rl_ops.masked import masked_mean

__all__ = ["PolicyDiagnostics", "policy_diagnostics"]


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
    low, high, _ = bounds_of(epsilon, epsilon_high, None)
    logps, old_logps = masked_inputs(mask, logps=logps, old_logps=old_logps)
    used = mask.bool()
    ratio = bounded_exp(logps - old_logps)
    below, above = ratio < low, ratio > high
    if advantages is not None:
        advantages = masked_advantages(advantages, mask)
        below, above = below & (advantages < 0), above & (advantages > 0)
    seen = ratio[used] if bool(used.any()) else ratio.new_ones(1)
    return PolicyDiagnostics(
        ratio_mean=seen.mean(),
        ratio_min=seen.min(),
        ratio_max=seen.max(),
        clip_fraction_low=masked_mean(below.to(ratio.dtype), used),
        clip_fraction_high=masked_mean(above.to(ratio.dtype), used),
        approx_kl=masked_mean(kl_estimate(old_logps, logps, "k3"), used),
    )
