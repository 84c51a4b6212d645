"""Log-probabilities and entropy of given tokens, straight from logits.

One read of the logits, sums in float32 whatever their type, and no temporary of their size in
forward; backward writes the one gradient it owes. The functions are ``torch.library`` custom ops
underneath: they work under ``torch.compile`` without a graph break, with fake tensors, and under
``vmap``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_ops import kernels
from rl_ops._vmap import fold
from rl_ops.kernels.memory import empty

__all__ = ["LogpsAndEntropy", "entropy_from_logits", "logps_and_entropy", "selective_log_softmax"]


class LogpsAndEntropy(NamedTuple):
    """Log-probs ``[...]`` or ``[..., K]`` and entropy ``[...]`` in nats, both float32."""

    logps: Tensor
    entropy: Tensor


def selective_log_softmax(logits: Tensor, index: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return ``log_softmax(logits / temperature)`` at ``index``, without building the log-softmax.

    Args:
        logits: ``[..., V]``, any floating type and strides; ``-inf`` marks vocabulary that cannot
            be sampled.
        index: ``[...]`` for one token a row or ``[..., K]`` for K of them, any integer type.
        temperature: positive; the logits are divided by it.

    Returns:
        Log-probs with the shape of ``index``; float32, or float64 for float64 logits.

    Raises:
        ValueError: the shapes do not belong together, or the temperature is not positive.
        IndexError: an index is outside ``[0, V)`` (on an accelerator it gives NaN, to spare a
            synchronisation).

    Example:
        >>> logits = torch.tensor([[1.0, 2.0, 3.0]])
        >>> selective_log_softmax(logits, torch.tensor([2]))
        tensor([-0.4076])
    """
    index, squeeze = token_index("logits", logits, index)
    logps = _forward(logits, index, _scale(temperature), False)[0]
    return logps.squeeze(-1) if squeeze else logps


def logps_and_entropy(
    logits: Tensor, index: Tensor, *, temperature: float = 1.0
) -> LogpsAndEntropy:
    """Return the log-probs of ``index`` and the entropy of each row, in one read.

    Shapes, types and errors as :func:`selective_log_softmax`; the entropy is that of
    ``softmax(logits / temperature)`` in nats, with ``0 * log 0 = 0``. Both carry gradient.

    Example:
        >>> logps, entropy = logps_and_entropy(torch.zeros(1, 4), torch.tensor([0]))
        >>> entropy
        tensor([1.3863])
    """
    index, squeeze = token_index("logits", logits, index)
    logps, entropy, _, _ = _forward(logits, index, _scale(temperature), True)
    return LogpsAndEntropy(logps.squeeze(-1) if squeeze else logps, entropy)


def entropy_from_logits(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the entropy in nats of ``softmax(logits / temperature)`` over the last dimension.

    Args:
        logits: ``[..., V]``, any floating type and strides.
        temperature: positive; the logits are divided by it.

    Returns:
        ``[...]`` in float32, or float64 for float64 logits.

    Example:
        >>> entropy_from_logits(torch.tensor([0.0, 0.0, float("-inf")]))
        tensor(0.6931)
    """
    _check_source("logits", logits)
    no_index = torch.empty((*logits.shape[:-1], 0), dtype=torch.int64, device=logits.device)
    return _forward(logits, no_index, _scale(temperature), True)[1]


@torch.library.custom_op(
    "rl_ops::logps_forward",
    mutates_args=(),
    schema="(Tensor logits, Tensor index, float scale, bool entropy)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward(
    logits: Tensor, index: Tensor, scale: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs [..., K], entropy [...] or empty, row maximum, sum of exponentials."""
    check_bounds(index, logits.shape[-1])
    z = rows_view(logits)
    stats = kernels.row_stats(z, scale=scale, entropy=entropy)
    lead = logits.shape[:-1]
    log_sum = stats.sum_exp.log()
    picked = logits.gather(-1, safe_index(index, logits.shape[-1])).to(log_sum.dtype)
    logps = picked.sub_(stats.maximum.view(*lead, 1)).mul_(scale).sub_(log_sum.view(*lead, 1))
    if index.device.type != "cpu":
        logps = logps.masked_fill((index < 0) | (index >= logits.shape[-1]), math.nan)
    h = log_sum - stats.sum_exp_d / stats.sum_exp if entropy else log_sum.new_empty(0)
    return logps, h.view(lead) if entropy else h, stats.maximum.view(lead), stats.sum_exp.view(lead)


@_forward.register_fake
def _(logits: Tensor, index: Tensor, scale: float, entropy: bool) -> tuple[Tensor, ...]:
    dtype = kernels.accumulation_dtype(logits.dtype)
    lead = logits.shape[:-1]
    shapes = index.shape, lead if entropy else (0,), lead, lead
    return tuple(logits.new_empty(shape, dtype=dtype) for shape in shapes)


@torch.library.custom_op(
    "rl_ops::logps_backward",
    mutates_args=(),
    schema="(Tensor? grad_logps, Tensor? grad_entropy, Tensor logits, Tensor index, Tensor maximum,"
    " Tensor sum_exp, Tensor entropy, float scale) -> Tensor",
)
def _backward(
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    index: Tensor,
    maximum: Tensor,
    sum_exp: Tensor,
    entropy: Tensor,
    scale: float,
) -> Tensor:
    z = rows_view(logits)
    lead = z.shape[:2]
    out = empty(logits.shape, logits.dtype, logits.device)
    kernels.logits_grad(
        z,
        index.reshape(*lead, index.shape[-1]),
        (maximum.reshape(lead), sum_exp.reshape(lead)),
        (
            None if grad_logps is None else grad_logps.reshape(*lead, index.shape[-1]),
            None if grad_entropy is None else grad_entropy.reshape(lead),
        ),
        entropy=None if grad_entropy is None else entropy.reshape(lead),
        scale=scale,
        out=out.view(z.shape),
    )
    return out


@_backward.register_fake
def _(grad_logps: Any, grad_entropy: Any, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, index, ctx.scale, ctx.with_entropy = inputs
    _, entropy, maximum, sum_exp = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, index, maximum, sum_exp, entropy)


def _autograd(ctx: Any, grad_logps: Any, grad_entropy: Any, *_: Any) -> tuple[Any, ...]:
    if not ctx.with_entropy:
        grad_entropy = None
    if grad_logps is None and grad_entropy is None:
        return None, None, None, None
    return _backward(grad_logps, grad_entropy, *ctx.saved_tensors, ctx.scale), None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
_forward.register_vmap(fold(_forward))
_backward.register_vmap(fold(_backward))


def rows_view(logits: Tensor) -> Tensor:
    """View ``[..., V]`` as ``[B, T, V]``; copies where two strides cannot describe it."""
    if logits.dim() == 3:
        return logits
    if logits.dim() < 3:
        return logits.view(*(1,) * (3 - logits.dim()), *logits.shape)
    return logits.flatten(0, -3)


def check_bounds(index: Tensor, width: int) -> None:
    """Raise where an index points outside the vocabulary (on the CPU, where it is cheap)."""
    if index.device.type != "cpu" or index.numel() == 0:
        return
    low, high = (int(x) for x in torch.aminmax(index))
    if low < 0 or high >= width:
        raise IndexError(
            f"index holds {low if low < 0 else high}, the vocabulary has {width} entries: "
            "mask ignored positions after the call and pass any valid id for them"
        )


def safe_index(index: Tensor, width: int) -> Tensor:
    """Clamp an index into the vocabulary, so that gathering never reads outside."""
    return index if index.device.type == "cpu" else index.clamp(0, max(width - 1, 0))


def token_index(name: str, source: Tensor, index: Tensor) -> tuple[Tensor, bool]:
    """Return the index as int64 ``[..., K]`` and whether K was added here."""
    _check_source(name, source)
    lead = source.shape[:-1]
    squeeze = index.dim() == len(lead)
    if index.shape[: len(lead)] != lead or index.dim() > len(lead) + 1:
        raise ValueError(
            f"index of shape {list(index.shape)} does not fit {name} of shape "
            f"{list(source.shape)}: pass {list(lead)}, or {[*lead, 'K']} for K tokens a row"
        )
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ValueError(f"index holds {index.dtype}: pass token ids in an integer type")
    index = index.to(torch.int64)
    return (index.unsqueeze(-1) if squeeze else index), squeeze


def _check_source(name: str, source: Tensor) -> None:
    if source.dim() == 0 or not source.is_floating_point() or source.shape[-1] == 0:
        raise ValueError(
            f"{name} of shape {list(source.shape)} and type {source.dtype}: "
            "pass floating-point numbers with a last dimension of at least 1"
        )


def _scale(temperature: float) -> float:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"temperature is {temperature}: pass a positive number (greedy has no log-probs)"
        )
    return 1.0 / temperature
