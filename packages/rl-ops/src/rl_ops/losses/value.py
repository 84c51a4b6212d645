"""The value function's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_ops.losses._inputs import masked_inputs

__all__ = ["clipped_value"]


def clipped_value(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    epsilon: float | None = 0.2,
) -> Tensor:
    """Half the larger squared error of the value and of the value clipped near the old one.

    ``0.5 * max((V - R)**2, (clip(V, V_old - epsilon, V_old + epsilon) - R)**2)``: PPO's value loss
    as its first implementation has it (Schulman et al. 2017, arXiv:1707.06347; Engstrom et al.
    2020, arXiv:2005.12729, section 3).

    Args:
        values: ``[B, T]``, predicted now.
        old_values: ``[B, T]``, predicted when sampling.
        returns: ``[B, T]``, the targets.
        mask: ``[B, T]``; masked positions give exactly 0 in value and gradient.
        epsilon: None leaves the clip out.

    Returns:
        ``[B, T]``.

    Example:
        >>> one = torch.ones(1, 1)
        >>> clipped_value(3 * one, one, one, one)
        tensor([[2.]])
    """
    values, old_values, returns = masked_inputs(
        mask, values=values, old_values=old_values.detach(), returns=returns.detach()
    )
    error = (values - returns).square()
    if epsilon is None:
        return 0.5 * error
    clipped = torch.minimum(torch.maximum(values, old_values - epsilon), old_values + epsilon)
    return 0.5 * torch.maximum(error, (clipped - returns).square())
