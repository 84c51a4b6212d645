"""Estimates of the KL divergence from the policy to the reference, from sampled tokens alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_ops.masked import require_finite, zero_masked

__all__ = ["bounded_exp", "kl_estimate"]

# exp is followed exactly up to here and by its tangent beyond: finite in float32 with room to
# square and sum gradients, and the slope keeps its sign. No honest log-ratio of one token reaches
# 40 nats.
EXP_LINEAR_FROM = 40.0


def bounded_exp(x: Tensor) -> Tensor:
    """Return ``exp(x)``, continued by its tangent above 40, so that value and gradient stay finite.

    Example:
        >>> bounded_exp(torch.tensor([0.0, 1000.0])).isfinite().all()
        tensor(True)
    """
    capped = x.clamp(max=EXP_LINEAR_FROM)
    slope = math.exp(EXP_LINEAR_FROM)
    # A sum of both branches would lose the gradient: -slope + exp(x) + slope is 0 in float32.
    return torch.where(x > EXP_LINEAR_FROM, slope * (1 + x - EXP_LINEAR_FROM), torch.exp(capped))


def kl_estimate(
    logps: Tensor, ref_logps: Tensor, kind: str = "k3", *, mask: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy || reference) for each token sampled from the policy.

    With ``d = ref_logps - logps`` (Schulman, "Approximating KL Divergence", 2020):

    - "k1" ``-d``: unbiased, may be negative.
    - "k2" ``d**2 / 2``: biased, low variance, its gradient is the unbiased one of the KL on-policy.
    - "k3" ``exp(d) - 1 - d``: unbiased, never negative.

    Args:
        logps: log-probs of the policy, any shape and floating type.
        ref_logps: the same of the reference; no gradient is stopped here.
        kind: "k1", "k2" or "k3".
        mask: masked positions give exactly 0, value and gradient.

    Returns:
        Estimates with the shape of ``logps``, in float32 (float64 for float64): in half precision
        ``exp(20)`` is already inf.

    Raises:
        ValueError: an unknown kind, or an unmasked number that is not finite.

    Example:
        >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.0]))
        tensor([0.])
    """
    logps, ref_logps = (x if x.dtype == torch.float64 else x.float() for x in (logps, ref_logps))
    require_finite("logps", logps, mask)
    require_finite("ref_logps", ref_logps, mask)
    if mask is not None:
        logps, ref_logps = zero_masked(logps, mask), zero_masked(ref_logps, mask)
    d = ref_logps - logps
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        capped = d.clamp(max=EXP_LINEAR_FROM)
        return torch.where(d < 1.0, torch.expm1(capped), bounded_exp(d) - 1) - d
    raise ValueError(f'kind is {kind!r}: pass "k1", "k2" or "k3"')
