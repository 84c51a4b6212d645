"""Losses of reward models."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_ops.losses._inputs import finite_rows

__all__ = ["bradley_terry"]


def bradley_terry(
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    *,
    margin: Tensor | None = None,
    centering: float = 0.0,
) -> Tensor:
    """``-log sigmoid(chosen - rejected - margin) + centering * (chosen + rejected)**2``.

    The pairwise loss of Bradley and Terry (1952) as in Ouyang et al. 2022 (arXiv:2203.02155,
    equation 1); the margin of Llama 2 (Touvron et al. 2023, arXiv:2307.09288, equation 2); the
    centring term of Eisenstein et al. 2023 (arXiv:2312.09244, section 3), which keeps rewards
    around 0 (0.01 there).

    Args:
        chosen_rewards: ``[B]``.
        rejected_rewards: ``[B]``.
        margin: ``[B]``, how much better the chosen one is said to be.
        centering: weight of the centring term.

    Returns:
        ``[B]``.

    Raises:
        ValueError: shapes that differ, or a number that is not finite.

    Example:
        >>> bradley_terry(torch.tensor([1.0]), torch.tensor([1.0]))
        tensor([0.6931])
    """
    chosen, rejected, margin = finite_rows(
        chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards, margin=margin
    )
    loss = -logsigmoid(chosen - rejected - margin)
    if centering == 0.0:
        return loss
    return loss + centering * (chosen + rejected).square()
