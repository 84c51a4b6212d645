"""The f-divergences of DPO, as scores in place of the log-ratio."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_ops.kl import bounded_exp
from rl_ops.losses._inputs import finite_rows

__all__ = ["f_divergence_score"]


def f_divergence_score(
    logratios: Tensor, *, kind: str = "reverse_kl", alpha: float = 0.5
) -> Tensor:
    """Return f-DPO's score in place of the log-ratio: ``f'(u)``, ``u = exp(logratios)``.

    Wang et al. 2023 (arXiv:2309.16240, table 1), up to a constant that cancels between chosen and
    rejected:

    - "reverse_kl": ``log u`` (DPO itself).
    - "forward_kl": ``1 - 1 / u``.
    - "js_divergence": ``log 2 + log(u / (1 + u))``.
    - "alpha_divergence": ``(u**(alpha - 1) - 1) / (alpha - 1)``; ``log u`` in the limit of 1.

    Pass the scores to a loss as the policy's log-probs with None for the reference. Exponentials
    above exp(40) go on as their tangent, so that value and gradient stay finite.
    """
    (logratios,) = finite_rows(logratios=logratios)
    if kind == "reverse_kl":
        return logratios
    if kind == "forward_kl":
        return 1 - bounded_exp(-logratios)
    if kind == "js_divergence":
        return math.log(2) + logsigmoid(logratios)
    if kind == "alpha_divergence":
        power = alpha - 1
        return logratios if abs(power) < 1e-6 else (bounded_exp(power * logratios) - 1) / power
    raise ValueError(
        f'kind is {kind!r}: pass "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence"'
    )
