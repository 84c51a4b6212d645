"""Masked statistics: masked positions contribute exactly nothing, whatever they hold."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["masked_mean", "masked_var", "masked_whiten", "require_finite", "zero_masked"]

Dims = int | tuple[int, ...] | None


def masked_mean(values: Tensor, mask: Tensor, dim: Dims = None) -> Tensor:
    """Return the mean over unmasked positions; 0 where there are none.

    Args:
        values: any shape; what masked positions hold (NaN, inf) does not matter.
        mask: broadcastable to ``values``; non-zero counts.
        dim: dimensions to average over, all by default.

    Example:
        >>> masked_mean(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([1, 1, 0]))
        tensor(2.)
    """
    mask = _as_mask(mask, values)
    return _sum(zero_masked(values, mask), dim) / _sum(mask.to(values.dtype), dim).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, dim: Dims = None, *, unbiased: bool = True) -> Tensor:
    """Return the variance over unmasked positions, with Bessel's correction by default.

    Raises:
        ValueError: fewer than two (one, when biased) unmasked positions along ``dim``.

    Example:
        >>> masked_var(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0]))
        tensor(2.)
    """
    mask = _as_mask(mask, values)
    count = _sum(mask.to(values.dtype), dim)
    least = 2 if unbiased else 1
    if not _tracing() and bool((count < least).any()):
        raise ValueError(
            f"a variance over {int(count.min())} unmasked values: at least {least} are needed"
            + (" (or pass unbiased=False)" if unbiased else "")
        )
    mean = _sum(zero_masked(values, mask), dim, keepdim=True) / _sum(
        mask.to(values.dtype), dim, keepdim=True
    )
    squares = zero_masked(zero_masked(values, mask) - mean, mask).square()
    return _sum(squares, dim) / (count - (1 if unbiased else 0))


def masked_whiten(
    values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8
) -> Tensor:
    """Return ``(values - mean) / sqrt(var + eps)`` over unmasked positions, 0 at masked ones.

    Args:
        values: any shape.
        mask: broadcastable to ``values``.
        shift_mean: False adds the mean back, so that only the scale changes.
        eps: added to the variance.

    Example:
        >>> masked_whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0]))
        tensor([-0.7071,  0.7071,  0.0000])
    """
    mask = _as_mask(mask, values)
    mean = masked_mean(values, mask)
    whitened = (zero_masked(values, mask) - mean) * torch.rsqrt(masked_var(values, mask) + eps)
    if not shift_mean:
        whitened = whitened + mean
    return zero_masked(whitened, mask)


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` with exact zeros, in value and gradient, where ``mask`` is 0.

    A product with the mask would keep NaN and inf; this does not.
    """
    return torch.where(
        mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device)
    )


def require_finite(name: str, values: Tensor, mask: Tensor | None = None) -> None:
    """Raise where an unmasked number is not finite, naming its place (contract: never a quiet 0).

    While ``torch.compile`` traces, nothing is checked: a non-finite number then reaches the loss as
    it is.

    Raises:
        ValueError: with the name, the first position and how many there are.
    """
    if _tracing():
        return
    bad = ~torch.isfinite(values.detach())
    if mask is not None:
        bad = bad & mask.bool()
    if not bool(bad.any()):
        return
    places = bad.nonzero()
    first = tuple(places[0].tolist())
    labels = ("row", "position", "entry")
    where = ", ".join(f"{label} {i}" for label, i in zip(labels, first, strict=False))
    raise ValueError(
        f"{name} is {values.detach()[first].item()} at {where or 'its only entry'} "
        f"({len(places)} unmasked non-finite in all): mask the position, or find what produced it"
    )


def _tracing() -> bool:
    return torch.compiler.is_compiling()


def _as_mask(mask: Tensor, values: Tensor) -> Tensor:
    try:
        return mask.bool().expand(values.shape)
    except RuntimeError:
        raise ValueError(
            f"mask of shape {list(mask.shape)} does not broadcast to values of shape "
            f"{list(values.shape)}"
        ) from None


def _sum(values: Tensor, dim: Dims, *, keepdim: bool = False) -> Tensor:
    if dim is None:
        dim = tuple(range(values.dim()))
    return values.sum(dim, keepdim=keepdim)
