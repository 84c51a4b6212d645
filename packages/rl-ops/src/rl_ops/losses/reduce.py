"""How unreduced losses become one number, with denominators counted over the whole optimiser step.

A step is often cut into micro-batches and ranks. The caller adds up :func:`loss_denominator` over
all of them first, then every part calls :func:`reduce_loss` with that one sum: the gradients of the
parts add up to that of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_ops.losses._inputs import wide
from rl_ops.masked import require_finite, zero_masked

__all__ = ["MODES", "loss_denominator", "reduce_loss", "sequence_logps"]

MODES = ("token_mean", "sequence_mean", "sequence_mean_token_sum", "constant")


def loss_denominator(
    mask: Tensor,
    *,
    mode: str,
    max_length: int | None = None,
    sequence_weight: Tensor | None = None,
) -> Tensor:
    """Return this batch's part of the denominator of a step, a float32 scalar.

    - "token_mean": unmasked tokens (times their row's weight).
    - "sequence_mean", "sequence_mean_token_sum": rows with an unmasked token (by weight).
    - "constant": the same rows times ``max_length`` (Dr. GRPO, arXiv:2503.20783).

    A row whose mask is all 0, a truncated one for example, is counted nowhere.

    Args:
        mask: ``[B, T]``, or ``[B]`` for per-sequence losses.
        mode: how :func:`reduce_loss` will average.
        max_length: the longest completion allowed, for "constant" alone.
        sequence_weight: ``[B]``; rows that are parts of one rollout share a weight of 1.

    Example:
        >>> loss_denominator(torch.tensor([[1, 1], [1, 0]]), mode="token_mean")
        tensor(3.)
    """
    _check_mode(mode)
    if (max_length is not None) != (mode == "constant"):
        raise ValueError(
            f'mode "{mode}" with max_length={max_length}: "constant" needs it, no other takes it'
        )
    used = mask.bool() if mask.dim() > 1 else mask.bool().unsqueeze(-1)
    count = used.sum(-1) if mode == "token_mean" else used.any(-1)
    weighted = count.float() * (max_length or 1)
    if sequence_weight is not None:
        weighted = weighted * _checked_weight(sequence_weight, mask)
    return weighted.sum()


def reduce_loss(
    values: Tensor,
    mask: Tensor | None = None,
    *,
    mode: str,
    denominator: Tensor | float,
    sequence_weight: Tensor | None = None,
) -> Tensor:
    """Return the scalar loss of this batch: a weighted sum divided by the whole step's denominator.

    "token_mean", "sequence_mean_token_sum" and "constant" sum every unmasked token; "sequence_mean"
    averages each row's tokens first. Per-sequence values ``[B]`` are summed in every mode.

    Args:
        values: ``[B, T]`` or ``[B]`` from a loss.
        mask: the same shape; None for ``[B]`` without masked rows.
        mode: "token_mean", "sequence_mean", "sequence_mean_token_sum" or "constant".
        denominator: the sum of :func:`loss_denominator` over micro-batches and ranks of the step.
            With gradients averaged over ranks (DDP), multiply the result by their number.
        sequence_weight: ``[B]``, as in :func:`loss_denominator`.

    Raises:
        ValueError: an unmasked value that is not finite (with its row), shapes that differ, an
            unknown mode, or a denominator that is not positive.

    Example:
        >>> mask = torch.tensor([[1, 1], [1, 0]])
        >>> total = loss_denominator(mask, mode="sequence_mean")
        >>> values = torch.tensor([[1.0, 3.0], [4.0, 9.0]])
        >>> reduce_loss(values, mask, mode="sequence_mean", denominator=total)
        tensor(3.)
    """
    _check_mode(mode)
    values = wide(values)
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.bool()
    if values.shape != mask.shape or values.dim() not in (1, 2):
        raise ValueError(
            f"values of shape {list(values.shape)} with a mask of {list(mask.shape)}: "
            "pass both as [B, T] or both as [B]"
        )
    require_finite("loss", values, mask)
    rows = zero_masked(values, mask)
    if values.dim() == 2:
        rows = rows.sum(-1)
        if mode == "sequence_mean":
            rows = rows / mask.sum(-1).clamp(min=1)
    if sequence_weight is not None:
        rows = rows * _checked_weight(sequence_weight, mask).to(rows)
    return rows.sum() / _checked_denominator(denominator, rows)


def sequence_logps(logps: Tensor, mask: Tensor) -> Tensor:
    """Return each row's log-prob over its unmasked tokens, ``[B, T]`` to ``[B]``.

    Example:
        >>> sequence_logps(torch.tensor([[-1.0, -2.0, float("nan")]]), torch.tensor([[1, 1, 0]]))
        tensor([-3.])
    """
    logps = wide(logps)
    require_finite("logps", logps, mask)
    return zero_masked(logps, mask).sum(-1)


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}: pass one of {', '.join(MODES)}")


def _checked_weight(sequence_weight: Tensor, mask: Tensor) -> Tensor:
    if sequence_weight.shape != mask.shape[:1]:
        raise ValueError(
            f"sequence_weight has shape {list(sequence_weight.shape)}: "
            f"pass one a row, [{mask.shape[0]}]"
        )
    return sequence_weight.detach()


def _checked_denominator(denominator: Tensor | float, like: Tensor) -> Tensor:
    total = torch.as_tensor(denominator, dtype=like.dtype, device=like.device).detach()
    if not torch.compiler.is_compiling() and not bool(total > 0):
        raise ValueError(
            f"denominator is {total.item()}: no token of the whole step is trained, "
            "skip the step or check the masks"
        )
    return total
