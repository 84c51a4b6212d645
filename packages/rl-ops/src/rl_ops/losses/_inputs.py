"""What every loss does to its inputs first: widen, check, and empty the masked positions."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_ops.masked import require_finite, zero_masked


def wide(values: Tensor) -> Tensor:
    """Return ``values`` in float32 or wider: half precision loses a loss's small terms."""
    return values if values.dtype == torch.float64 else values.float()


def masked_inputs(mask: Tensor, **named: Tensor) -> list[Tensor]:
    """Return the tensors ``[B, T]`` with 0 where the mask is 0.

    This comes before all else: emptying after an ``exp`` would be too late: ``0 * inf`` in the
    backward pass is NaN.

    Raises:
        ValueError: shapes that differ, or an unmasked number that is not finite (with its row).
    """
    result = []
    for name, values in named.items():
        if values.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {list(values.shape)}, the mask {list(mask.shape)}: "
                "they must agree"
            )
        values = wide(values)
        require_finite(name, values, mask)
        result.append(zero_masked(values, mask))
    return result


def masked_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return advantages ``[B]`` or ``[B, T]`` as ``[B, T]``, 0 where the mask is 0.

    Raises:
        ValueError: another shape, or an unmasked number that is not finite (with its row).
    """
    if advantages.dim() == mask.dim() - 1 and advantages.shape == mask.shape[:-1]:
        advantages = advantages.unsqueeze(-1).expand(mask.shape)
    if advantages.shape != mask.shape:
        raise ValueError(
            f"advantages have shape {list(advantages.shape)}: pass [B] or [B, T] for a mask of "
            f"shape {list(mask.shape)}"
        )
    return masked_inputs(mask, advantages=advantages.detach())[0]


def finite_rows(**named: Tensor | None) -> list[Tensor]:
    """Return per-sequence tensors ``[B]`` widened; None becomes zeros of the first one's shape.

    Raises:
        ValueError: shapes that differ, or a number that is not finite (with its row).
    """
    result: list[Tensor] = []
    shape = next(x.shape for x in named.values() if x is not None)
    for name, values in named.items():
        if values is None:
            result.append(torch.zeros_like(result[0]))
            continue
        if values.shape != shape:
            raise ValueError(f"{name} has shape {list(values.shape)}, expected {list(shape)}")
        values = wide(values)
        require_finite(name, values)
        result.append(values)
    return result
