"""Losses on unpaired examples, each labelled desirable or not. All return ``[B]``."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_ops.losses._inputs import finite_rows
from rl_ops.masked import masked_mean

__all__ = ["apo_zero_unpaired", "kto", "kto_kl"]


def kto(
    logps: Tensor,
    ref_logps: Tensor,
    labels: Tensor,
    *,
    kl: Tensor | float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimisation.

    With ``h = logps - ref_logps`` and ``z0`` the KL baseline: ``w_d * (1 - sigmoid(beta * (h -
    z0)))`` for desirable rows, ``w_u * (1 - sigmoid(beta * (z0 - h)))`` for the others (Ethayarajh
    et al. 2024, arXiv:2402.01306, equation 8). Finite with any mix of labels.

    Args:
        logps: ``[B]``, summed over the completion.
        ref_logps: ``[B]``, the reference's.
        labels: ``[B]``, true where desirable.
        kl: ``z0`` from :func:`kto_kl`, one number for the whole step, without gradient.
        beta: strength of the pull to the reference.
        desirable_weight: ``w_d``.
        undesirable_weight: ``w_u``.

    Example:
        >>> kto(torch.zeros(2), torch.zeros(2), torch.tensor([True, False]), kl=0.0)
        tensor([0.5000, 0.5000])
    """
    logps, ref_logps = finite_rows(logps=logps, ref_logps=ref_logps)
    kl = torch.as_tensor(kl, dtype=logps.dtype, device=logps.device).detach()
    gap = beta * (logps - ref_logps - kl)
    desirable = desirable_weight * torch.sigmoid(-gap)
    return torch.where(labels.bool(), desirable, undesirable_weight * torch.sigmoid(gap))


def kto_kl(
    mismatched_logps: Tensor, mismatched_ref_logps: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return KTO's baseline ``z0 = max(0, mean(logps - ref_logps))`` over mismatched pairs.

    Args:
        mismatched_logps: ``[B]``, completions scored behind another row's prompt; gather the whole
            step first, so that the loss does not depend on how it is split.
        mismatched_ref_logps: ``[B]``, the reference's. No gradient flows through either.
        mask: ``[B]``, rows to leave out.

    Example:
        >>> kto_kl(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -4.0]))
        tensor(1.5000)
    """
    gap = (mismatched_logps - mismatched_ref_logps).detach().float()
    return masked_mean(gap, torch.ones_like(gap) if mask is None else mask).clamp(min=0)


def apo_zero_unpaired(
    logps: Tensor,
    ref_logps: Tensor,
    labels: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """APO-zero on unpaired rows: :func:`kto` with ``z0 = 0``.

    D'Oosterlinck et al. 2024 (arXiv:2408.06266, equation 7): ``1 - sigmoid(beta * h)`` for
    desirable rows, ``sigmoid(beta * h)`` for the others.
    """
    return kto(
        logps,
        ref_logps,
        labels,
        kl=0.0,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
