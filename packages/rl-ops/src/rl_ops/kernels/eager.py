"""Plain torch, in blocks of rows small enough to stay in cache: any device, any floating type."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# A block of this many numbers is read, exponentiated and summed before it leaves a core's cache.
# Measured on x86: 2**18 to 2**19 are equal, smaller ones pay for calls and larger ones for memory.
BLOCK_NUMBERS = 2**18

LOG2E = math.log2(math.e)


def row_stats(z: Tensor, *, scale: float, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`rl_ops.kernels.row_stats`."""
    dtype = torch.float64 if z.dtype == torch.float64 else torch.float32
    lead = z.shape[:2]
    maximum, sum_exp = (z.new_empty(lead, dtype=dtype) for _ in range(2))
    sum_exp_d = z.new_empty(lead if entropy else (0,), dtype=dtype)
    buffer = z.new_empty(_block_rows(z), z.shape[2], dtype=dtype)
    for batch, rows in _blocks(z):
        block = z[batch, rows]
        u = buffer[: block.shape[0]]
        if block.dtype != dtype:
            block = u.copy_(block)
        maximum[batch, rows] = top = block.amax(-1)
        _shift_and_scale(block, top, scale, out=u)
        if entropy:
            e = u.exp2()
            sum_exp[batch, rows] = e.sum(-1)
            # exp(-inf) * -inf counts as 0, as the limit is
            sum_exp_d[batch, rows] = e.mul_(u.clamp_(min=-1e4)).sum(-1).div_(LOG2E)
        else:
            sum_exp[batch, rows] = u.exp2_().sum(-1)
    return maximum, sum_exp, sum_exp_d


def logits_grad(
    z: Tensor,
    index: Tensor,
    stats: tuple[Tensor, Tensor],
    grads: tuple[Tensor | None, Tensor | None],
    *,
    entropy: Tensor | None,
    scale: float,
    out: Tensor,
) -> None:
    """See :func:`rl_ops.kernels.logits_grad`."""
    maximum, sum_exp = stats
    grad_logps, grad_entropy = grads
    width = z.shape[2]
    buffer = z.new_empty(_block_rows(z), width, dtype=maximum.dtype)
    inside = (index >= 0) & (index < width)
    safe_index = index.where(inside, 0)
    for batch, rows in _blocks(z):
        block, top, total = z[batch, rows], maximum[batch, rows], sum_exp[batch, rows]
        u = out[batch, rows] if out.dtype == buffer.dtype else buffer[: block.shape[0]]
        _shift_and_scale(block, top, scale, out=u)
        g_sum = total.new_zeros(()) if grad_logps is None else grad_logps[batch, rows].sum(-1)
        if grad_entropy is None or entropy is None:
            u.exp2_().mul_((g_sum * -scale / total)[:, None])
        else:
            # -p * (sum of g_logp + g_entropy * (log p + H)), log p = d - log(sum_exp)
            p = u.exp2().mul_((scale / total)[:, None])
            g_entropy = grad_entropy[batch, rows]
            offset = g_sum + g_entropy * (entropy[batch, rows] - total.log())
            u.clamp_(min=-1e4).mul_((g_entropy / -LOG2E)[:, None]).sub_(offset[:, None]).mul_(p)
        # what a row without gradient holds (NaN) must not reach the result
        active = _active(grads, batch, rows)
        if u.device.type != "cpu" or not bool(active.all()):
            u.masked_fill_(~active, 0.0)
        if grad_logps is not None and index.shape[2]:
            source = grad_logps[batch, rows].mul(scale).where(inside[batch, rows], 0)
            u.scatter_add_(1, safe_index[batch, rows], source.to(u.dtype))
        if out.dtype != u.dtype:
            out[batch, rows] = u


def _active(grads: tuple[Tensor | None, Tensor | None], batch: int, rows: slice) -> Tensor:
    """Return ``[rows, 1]``, whether any gradient of a row is not 0 (NaN is not)."""
    given = [g[batch, rows].unsqueeze(-1).flatten(1) for g in grads if g is not None]
    return torch.cat(given, 1).ne(0).any(1, keepdim=True)


def _shift_and_scale(block: Tensor, top: Tensor, scale: float, *, out: Tensor) -> None:
    """Write ``(block - top) * scale * log2(e)``, the exponent for ``exp2``.

    A row that holds only -inf stays -inf instead of becoming NaN. ``exp2`` because torch's ``exp``
    takes four times as long on some processors.
    """
    finite_top = top.masked_fill(top == -torch.inf, 0.0)[:, None]
    if block.dtype == out.dtype:
        torch.sub(block, finite_top, out=out)
    else:
        out.copy_(block).sub_(finite_top)
    out.mul_(scale * LOG2E)


def _block_rows(z: Tensor) -> int:
    """Return how many rows make a block."""
    if z.device.type != "cpu":
        return max(1, min(z.shape[1], 2**24 // max(1, z.shape[2])))
    return max(1, min(z.shape[1], BLOCK_NUMBERS // max(1, z.shape[2])))


def _blocks(z: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the (batch, rows) pairs that cut ``z`` ``[B, T, V]`` into blocks."""
    step = _block_rows(z)
    for batch in range(z.shape[0]):
        for start in range(0, z.shape[1], step):
            yield batch, slice(start, start + step)
