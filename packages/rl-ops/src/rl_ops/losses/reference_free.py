"""Preference losses without a reference model. All return ``[B]``.

``chosen_logps`` and ``rejected_logps`` are ``[B]``, *summed* over the completion; losses that
average take the lengths. A number that is not finite raises ValueError with its row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_ops.losses._inputs import finite_rows
from rl_ops.losses._pairs import per_token, smoothed_logistic

__all__ = ["cpo", "orpo", "simpo"]


def simpo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``-log sigmoid(beta * (logp_w / |y_w| - logp_l / |y_l|) - gamma)``, no reference.

    SimPO (Meng et al. 2024, arXiv:2405.14734, equation 6).

    Args:
        chosen_logps: ``[B]``, summed.
        rejected_logps: ``[B]``, summed.
        chosen_lengths: ``[B]``, tokens in each chosen completion.
        rejected_lengths: ``[B]``.
        beta: scale of the rewards.
        gamma: margin between them (the paper tunes ``gamma / beta`` around 0.5).
        label_smoothing: probability that a label is flipped.
    """
    chosen, rejected = finite_rows(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    d = per_token(chosen, chosen_lengths) - per_token(rejected, rejected_lengths)
    return smoothed_logistic(beta * d - gamma, label_smoothing)


def cpo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    chosen_lengths: Tensor | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    nll_weight: float = 1.0,
) -> Tensor:
    """``-log sigmoid(beta * (logp_w - logp_l)) + nll_weight * -logp_w / |y_w|``, no reference.

    CPO (Xu et al. 2024, arXiv:2401.08417, equations 3 to 5).

    Raises:
        ValueError: ``nll_weight`` other than 0 without ``chosen_lengths``, or lengths that nothing
            uses.
    """
    chosen, rejected = finite_rows(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    loss = smoothed_logistic(beta * (chosen - rejected), label_smoothing)
    if (chosen_lengths is not None) != (nll_weight != 0.0):
        raise ValueError(
            f"nll_weight={nll_weight} and chosen_lengths go together: "
            "pass the lengths, or nll_weight=0"
        )
    if chosen_lengths is None:
        return loss
    return loss - nll_weight * per_token(chosen, chosen_lengths)


def orpo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 0.1,
    nll_weight: float = 1.0,
) -> Tensor:
    """Likelihood of the chosen one plus a log odds ratio, no reference.

    ``-nll_weight * a_w - beta * log sigmoid(log_odds(a_w) - log_odds(a_l))``, ``a`` the mean
    log-prob of a token.

    ``log_odds(a) = a - log(1 - exp(a))``. ORPO (Hong et al. 2024, arXiv:2403.07691, equations 4 to
    7; beta is its lambda). ``a`` is kept below -1e-6, so that a certain answer has finite odds.
    """
    chosen, rejected = finite_rows(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    chosen = per_token(chosen, chosen_lengths)
    rejected = per_token(rejected, rejected_lengths)
    gap = _log_odds(chosen) - _log_odds(rejected)
    return -nll_weight * chosen - beta * logsigmoid(gap)


def _log_odds(mean_logps: Tensor) -> Tensor:
    bounded = mean_logps.clamp(max=-1e-6)
    return bounded - torch.log(-torch.expm1(bounded))
