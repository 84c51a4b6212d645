"""The head and the log-softmax in chunks of rows and vocabulary, on top of the two row kernels.

Nothing of the size of the logits is ever held. The vocabulary is the outer loop, so that a piece of
the weight is converted once and its gradient is complete when the piece is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_ops import kernels
from rl_ops.kernels.memory import empty

# Numbers in a chunk of logits, and the most rows and vocabulary of one. On the CPU measured at
# hidden size 576: the matrix products run at full speed from 1024 on and the chunk stays in the
# last-level cache. An accelerator wants larger products.
CPU_CHUNK = (2**21, 2048, 4096)
DEVICE_CHUNK = (2**26, 8192, 32768)
# Logits that forward keeps so that backward need not compute them again: up to this much, whatever
# the vocabulary.
KEPT_BYTES = 72 * 2**20


@dataclass(frozen=True)
class Head:
    """A head and what is fed to it.

    ``z = sum_i inputs[i] @ weights[i].T + bias``, then scale, soft cap, temperature.

    Args:
        inputs: ``[N, H_i]`` in the type of the products; the second pair is a low-rank update of
            the weight.
        weights: ``[V, H_i]``, any type.
        bias: ``[V]``.
        logit_scale: multiplies the logits, positive.
        softcap: ``c * tanh(z / c)`` follows.
        inverse_temperature: multiplies what comes out.
    """

    inputs: list[Tensor]
    weights: list[Tensor]
    bias: Tensor | None
    logit_scale: float
    softcap: float | None
    inverse_temperature: float

    @property
    def dtype(self) -> torch.dtype:
        """The type of the products."""
        return self.inputs[0].dtype

    @property
    def rows(self) -> int:
        """How many rows are fed."""
        return self.inputs[0].shape[0]

    @property
    def width(self) -> int:
        """The size of the vocabulary."""
        return self.weights[0].shape[0]

    @property
    def kernel_scale(self) -> float:
        """What the row kernels multiply by: without a soft cap the logit scale is folded in."""
        scale = 1.0 if self.softcap is not None else self.logit_scale
        return scale * self.inverse_temperature

    def columns(self, vocab: slice) -> tuple[list[Tensor], Tensor | None]:
        """Return a piece of the weights and the bias in the type of the products."""
        pieces = [weight[vocab].to(self.dtype) for weight in self.weights]
        return pieces, None if self.bias is None else self.bias[vocab].to(self.dtype)

    def raw(self, rows: slice, pieces: list[Tensor], bias: Tensor | None, *, out: Tensor) -> Tensor:
        """Compute a chunk of the logits before scale and cap into ``out``."""
        first = self.inputs[0][rows]
        if bias is None:
            torch.mm(first, pieces[0].t(), out=out)
        else:
            torch.addmm(bias, first, pieces[0].t(), out=out)
        for more, piece in zip(self.inputs[1:], pieces[1:], strict=True):
            out.addmm_(more[rows], piece.t())
        return out

    def capped(self, raw: Tensor) -> Tensor:
        """Apply scale and soft cap, in float32 at least; nothing without a cap."""
        if self.softcap is None:
            return raw
        wide = raw.to(kernels.accumulation_dtype(raw.dtype), copy=True)
        return wide.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap)

    def select(self, rows: Tensor) -> Head:
        """Return the head fed with some of the rows."""
        inputs = [x[rows] for x in self.inputs]
        rest = self.logit_scale, self.softcap, self.inverse_temperature
        return Head(inputs, self.weights, self.bias, *rest)


@dataclass(frozen=True)
class Rows:
    """What is known of each row after forward: ``[N, K]`` index and log-probs, ``[N]`` the rest."""

    index: Tensor
    maximum: Tensor
    sum_exp: Tensor
    entropy: Tensor | None

    def select(self, rows: Tensor) -> Rows:
        """Return some of the rows."""
        entropy = None if self.entropy is None else self.entropy[rows]
        return Rows(self.index[rows], self.maximum[rows], self.sum_exp[rows], entropy)


def forward(
    head: Head, index: Tensor, *, entropy: bool, kept: Tensor, expected: Tensor
) -> tuple[Tensor, Rows]:
    """Return the log-probs ``[N, K]`` and what backward needs to know of each row.

    Args:
        head: the head and its inputs.
        index: ``[N, K]``.
        entropy: whether the entropy is wanted.
        kept: ``[chunks, N, vocab]`` from :func:`kept_shape`; filled with the first chunks of raw
            logits.
        expected: ``[N, H]`` or empty; filled with the weight's mean under each row's distribution,
            from which the hidden gradient follows without computing the logits again (a frozen
            weight, no soft cap).
    """
    state = _Running(head, index, entropy=entropy)
    scale, steps = head.kernel_scale, _steps(head)
    buffer = _buffer(head, steps)
    for number, vocab in enumerate(_chunks(head.width, steps[1])):
        pieces, bias = head.columns(vocab)
        for rows in _chunks(head.rows, steps[0]):
            out = kept[number, rows] if number < kept.shape[0] else _fit(buffer, rows, vocab)
            raw = head.raw(rows, pieces, bias, out=out)
            z = head.capped(raw)
            stats = kernels.row_stats(z[None], scale=scale, entropy=entropy)
            old, new = state.add(rows, vocab, z, stats)
            if expected.numel():
                mean = _exponentials(raw, stats, scale, keep=number < kept.shape[0]) @ pieces[0]
                expected[rows].mul_(old[:, None]).addcmul_(mean, new[:, None].to(expected.dtype))
    if expected.numel():
        expected.div_(state.sum_exp[:, None])
    return state.finish()


def kept_shape(head: Head) -> tuple[int, int, int]:
    """Return the shape of the logits that forward keeps for backward, within the fixed budget."""
    rows, vocab = head.rows, _steps(head)[1]
    chunk_bytes = max(1, rows * vocab * head.dtype.itemsize)
    return min(head.width // vocab, KEPT_BYTES // chunk_bytes), rows, vocab


def backward(
    head: Head,
    rows: Rows,
    grads: tuple[Tensor | None, Tensor | None],
    *,
    kept: Tensor,
    needs: tuple[list[bool], list[bool], bool],
) -> tuple[list[Tensor | None], list[Tensor | None], Tensor | None]:
    """Return the gradients of the inputs, of the weights and of the bias; None where not needed.

    Rows whose gradients are all 0 take no part: they cost nothing, and what they hold cannot reach
    the result.
    """
    active = _active(grads)
    if active is None:
        return _backward(head, rows, grads, kept=kept, needs=needs)
    grads = tuple(None if g is None else g[active] for g in grads)  # type: ignore[assignment]
    d_inputs, d_weights, d_bias = _backward(
        head.select(active), rows.select(active), grads, kept=kept[:, active], needs=needs
    )
    for i, gradient in enumerate(d_inputs):
        if gradient is not None:
            d_inputs[i] = gradient.new_zeros(head.inputs[i].shape).index_copy_(0, active, gradient)
    return d_inputs, d_weights, d_bias


def _backward(
    head: Head,
    rows: Rows,
    grads: tuple[Tensor | None, Tensor | None],
    *,
    kept: Tensor,
    needs: tuple[list[bool], list[bool], bool],
) -> tuple[list[Tensor | None], list[Tensor | None], Tensor | None]:
    need_inputs, need_weights, need_bias = needs
    dtype = rows.maximum.dtype
    d_inputs = [
        torch.zeros(x.shape, dtype=dtype, device=x.device) if need else None
        for x, need in zip(head.inputs, need_inputs, strict=True)
    ]
    d_weights = [
        empty(w.shape, w.dtype, w.device) if need else None
        for w, need in zip(head.weights, need_weights, strict=True)
    ]
    d_bias = rows.maximum.new_zeros(head.width) if need_bias else None
    # what was kept is cut as forward cut it, however many rows take part here
    steps = (_steps(head)[0], kept.shape[2]) if kept.shape[0] else _steps(head)
    buffer = _buffer(head, steps)
    for number, vocab in enumerate(_chunks(head.width, steps[1])):
        pieces, bias = head.columns(vocab)
        sums = [_Sum(d, vocab) for d in d_weights]
        for chunk in _chunks(head.rows, steps[0]):
            if number < kept.shape[0]:
                raw = kept[number, chunk]
            else:
                raw = head.raw(chunk, pieces, bias, out=_fit(buffer, chunk, vocab))
            dz = _chunk_grad(head, rows, grads, (chunk, vocab), raw=raw, buffer=buffer)
            for d, piece in zip(d_inputs, pieces, strict=True):
                if d is not None:
                    _add_product(d[chunk], dz, piece)
            for total, x in zip(sums, head.inputs, strict=True):
                total.add(dz, x[chunk], whole=chunk.stop - chunk.start == head.rows)
            if d_bias is not None:
                d_bias[vocab] += dz.sum(0, dtype=dtype)
        for total in sums:
            total.write()
    return d_inputs, d_weights, d_bias


def _chunk_grad(
    head: Head,
    rows: Rows,
    grads: tuple[Tensor | None, Tensor | None],
    chunk: tuple[slice, slice],
    *,
    raw: Tensor,
    buffer: Tensor,
) -> Tensor:
    """Return the gradient of a chunk of raw logits, in the type of the products."""
    at, vocab = chunk
    z = head.capped(raw)
    out = _fit(buffer, at, vocab) if head.softcap is None else torch.empty_like(z)
    kernels.logits_grad(
        z[None],
        rows.index[None, at] - vocab.start,
        (rows.maximum[None, at], rows.sum_exp[None, at]),
        (
            None if grads[0] is None else grads[0][None, at],
            None if grads[1] is None else grads[1][None, at],
        ),
        entropy=None if rows.entropy is None else rows.entropy[None, at],
        scale=head.kernel_scale,
        out=out[None],
    )
    if head.softcap is None:
        return out
    # d/dx c * tanh(s * x / c) = s * (1 - tanh**2)
    slope = z.div_(head.softcap).square_().neg_().add_(1.0)
    return out.mul_(slope).mul_(head.logit_scale).to(head.dtype)


class _Running:
    """Softmax statistics of whole rows from chunks (Milakov and Gimelshein 2018)."""

    def __init__(self, head: Head, index: Tensor, *, entropy: bool) -> None:
        self.scale, self.index, self.entropy = head.kernel_scale, index, entropy
        self.dtype = kernels.accumulation_dtype(head.dtype)
        wide = torch.float32 if index.device.type == "mps" else torch.float64
        n = head.rows
        self.maximum = torch.full((n,), -torch.inf, dtype=self.dtype, device=index.device)
        self.sum_exp, self.sum_exp_d = torch.zeros(2, n, dtype=wide, device=index.device)
        self.picked = torch.full(index.shape, torch.nan, dtype=self.dtype, device=index.device)

    def add(
        self, rows: slice, vocab: slice, z: Tensor, stats: kernels.RowStats
    ) -> tuple[Tensor, Tensor]:
        """Take a chunk in; return the factors of the older exponentials and of its own."""
        here, top = stats.maximum[0], self.maximum[rows]
        maximum = torch.maximum(here, top)
        base = maximum.masked_fill(maximum == -torch.inf, 0.0)
        d_old = ((top - base) * self.scale).clamp(min=-1e4).to(self.sum_exp.dtype)
        d_new = ((here - base) * self.scale).clamp(min=-1e4).to(self.sum_exp.dtype)
        old, new = d_old.exp(), d_new.exp()
        if self.entropy:
            sum_old = self.sum_exp_d[rows] + self.sum_exp[rows] * d_old
            sum_new = stats.sum_exp_d[0] + stats.sum_exp[0] * d_new
            self.sum_exp_d[rows] = sum_old * old + sum_new * new
        self.sum_exp[rows] = self.sum_exp[rows] * old + stats.sum_exp[0] * new
        self.maximum[rows] = maximum
        local = self.index[rows] - vocab.start
        inside = (local >= 0) & (local < z.shape[1])
        values = z.gather(1, local.clamp(0, z.shape[1] - 1)).to(self.dtype)
        self.picked[rows] = torch.where(inside, values, self.picked[rows])
        return old, new

    def finish(self) -> tuple[Tensor, Rows]:
        """Return the log-probs and the statistics of the rows."""
        log_sum = self.sum_exp.log()
        logps = (self.picked - self.maximum[:, None]) * self.scale - log_sum[:, None]
        entropy = (log_sum - self.sum_exp_d / self.sum_exp).to(self.dtype) if self.entropy else None
        rows = Rows(self.index, self.maximum, self.sum_exp.to(self.dtype), entropy)
        return logps.to(self.dtype), rows


class _Sum:
    """The gradient of one piece of a weight, summed in float32 and written once."""

    def __init__(self, gradient: Tensor | None, vocab: slice) -> None:
        self.target = None if gradient is None else gradient[vocab]
        self.total: Tensor | None = None

    def add(self, dz: Tensor, x: Tensor, *, whole: bool) -> None:
        """Add ``dz.T @ x``; straight into the gradient where it is the only term."""
        if self.target is None:
            return
        if whole and self.target.dtype == dz.dtype:
            torch.mm(dz.t(), x, out=self.target)
            self.target = None
        elif self.total is None:
            self.total = (dz.t() @ x).to(kernels.accumulation_dtype(dz.dtype))
        else:
            _add_product(self.total, dz.t(), x)

    def write(self) -> None:
        """Write the sum, or zeros where no row came."""
        if self.target is None:
            return
        if self.total is None:
            self.target.zero_()
        else:
            self.target.copy_(self.total)


def _exponentials(raw: Tensor, stats: kernels.RowStats, scale: float, *, keep: bool) -> Tensor:
    """Return ``exp((z - maximum of the chunk) * scale)``, over ``raw`` unless it is kept."""
    out = torch.empty_like(raw) if keep else raw
    n = raw.shape[0]
    nowhere = torch.full((1, n, 1), -1, dtype=torch.int64, device=raw.device)
    ones = torch.ones_like(stats.maximum)
    # the gradient kernel gives -scale * p * (sum of gradients)
    grads = (torch.full_like(ones, -1 / scale)[..., None], None)
    kernels.logits_grad(
        raw[None], nowhere, (stats.maximum, ones), grads, entropy=None, scale=scale, out=out[None]
    )
    return out


def _active(grads: tuple[Tensor | None, Tensor | None]) -> Tensor | None:
    """Return the rows that have a gradient, or None if all have or a graph is captured."""
    given = [g if g.dim() == 2 else g[:, None] for g in grads if g is not None]
    if given[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    active = torch.cat(given, 1).ne(0).any(1).nonzero().flatten()
    return None if active.numel() == given[0].shape[0] else active


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _steps(head: Head) -> tuple[int, int]:
    numbers, most_rows, most_vocab = (
        CPU_CHUNK if head.inputs[0].device.type == "cpu" else DEVICE_CHUNK
    )
    rows = max(1, min(head.rows, most_rows))
    return rows, max(1, min(head.width, most_vocab, numbers // rows))


def _chunks(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _buffer(head: Head, steps: tuple[int, int]) -> Tensor:
    """Return room for one chunk of logits."""
    return empty((steps[0] * steps[1],), head.dtype, head.inputs[0].device)


def _fit(buffer: Tensor, rows: slice, vocab: slice) -> Tensor:
    n, v = rows.stop - rows.start, vocab.stop - vocab.start
    return buffer[: n * v].view(n, v)
