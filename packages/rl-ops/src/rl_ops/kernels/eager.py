"""Plain torch, in blocks of rows small enough to stay in cache: any device, any floating type."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# A block of this many numbers is read, exponentiated and summed before it leaves a core's cache. Measured on
# x86: 2**18 to 2**19 are equal, smaller ones pay for calls and larger ones for memory.
BLOCK_NUMBERS = 2**18


def row_stats(z: Tensor, *, scale: float, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`rl_ops.kernels.row_stats`."""
    dtype = torch.float64 if z.dtype == torch.float64 else torch.float32
    lead = z.shape[:2]
    maximum, sum_exp = (z.new_empty(lead, dtype=dtype) for _ in range(2))
    sum_exp_d = z.new_empty(lead if entropy else (0,), dtype=dtype)
    buffer = z.new_empty(_block_rows(z), z.shape[2], dtype=dtype)
    for batch, rows in _blocks(z):
        block = z[batch, rows]
        d = buffer[: block.shape[0]]
        maximum[batch, rows] = top = block.amax(-1)
        _shift_and_scale(block, top, scale, out=d)
        if entropy:
            e = d.exp()
            sum_exp[batch, rows] = e.sum(-1)
            # exp(-inf) * -inf counts as 0, as the limit is
            sum_exp_d[batch, rows] = e.mul_(d.clamp_(min=-1e4)).sum(-1)
        else:
            sum_exp[batch, rows] = d.exp_().sum(-1)
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
        block = z[batch, rows]
        d = buffer[: block.shape[0]]
        top, total = maximum[batch, rows], sum_exp[batch, rows]
        _shift_and_scale(block, top, scale, out=d)
        coefficient = -scale / total
        if grad_logps is not None:
            coefficient = coefficient * grad_logps[batch, rows].sum(-1)
        if grad_entropy is None or entropy is None:
            d.exp_().mul_(coefficient[:, None])
        else:
            # -p * (sum of g_logp + g_entropy * (log p + H)), log p = d - log(sum_exp)
            p = d.exp().mul_((scale / total)[:, None])
            g_entropy = grad_entropy[batch, rows]
            offset = g_entropy * (entropy[batch, rows] - total.log())
            if grad_logps is not None:
                offset = offset + grad_logps[batch, rows].sum(-1)
            d.clamp_(min=-1e4).mul_(-g_entropy[:, None]).sub_(offset[:, None]).mul_(p)
        if grad_logps is not None and index.shape[2]:
            source = grad_logps[batch, rows].mul(scale).where(inside[batch, rows], 0)
            d.scatter_add_(1, safe_index[batch, rows], source.to(d.dtype))
        out[batch, rows] = d


def _shift_and_scale(block: Tensor, top: Tensor, scale: float, *, out: Tensor) -> None:
    """Write ``(block - top) * scale``; a row that holds only -inf stays -inf instead of becoming NaN."""
    finite_top = top.to(out.dtype).masked_fill(top == -torch.inf, 0.0)
    if block.dtype == out.dtype:
        torch.sub(block, finite_top[:, None], out=out)
    else:
        out.copy_(block).sub_(finite_top[:, None])
    if scale != 1.0:
        out.mul_(scale)


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
