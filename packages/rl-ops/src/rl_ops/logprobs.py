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
    logps = _forward(logits, index, scale=_scale(temperature), entropy=False)[0]
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
    logps, entropy, _ = _forward(logits, index, scale=_scale(temperature), entropy=True)
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
    return _forward(logits, no_index, scale=_scale(temperature), entropy=True)[1]


@torch.library.custom_op(
    "rl_ops::logps_forward",
    mutates_args=(),
    schema="(Tensor logits, Tensor index, *, float scale, bool entropy)"
    " -> (Tensor, Tensor, Tensor)",
)
def _forward(
    logits: Tensor, index: Tensor, *, scale: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs [..., K], entropy [...] or empty, and [..., 2]: row maximum, sum of exp."""
    check_bounds(index, logits.shape[-1])
    stats = kernels.row_stats(rows_view(logits), scale=scale, entropy=entropy)
    lead = logits.shape[:-1]
    maximum, sum_exp = stats.maximum.view(lead), stats.sum_exp.view(lead)
    log_sum = sum_exp.log()
    picked = logits.gather(-1, safe_index(index, logits.shape[-1])).to(log_sum.dtype)
    logps = picked.sub_(maximum[..., None]).mul_(scale).sub_(log_sum[..., None])
    if index.device.type != "cpu":
        logps = logps.masked_fill((index < 0) | (index >= logits.shape[-1]), math.nan)
    sum_exp_d = stats.sum_exp_d.view(lead if entropy else (0,))
    h = log_sum - sum_exp_d / sum_exp if entropy else sum_exp_d
    return logps, h, torch.stack([maximum, sum_exp], -1)


@_forward.register_fake
def _(logits: Tensor, index: Tensor, *, scale: float, entropy: bool) -> tuple[Tensor, ...]:
    lead = logits.shape[:-1]
    shapes = index.shape, lead if entropy else (0,), (*lead, 2)
    return tuple(
        logits.new_empty(shape, dtype=kernels.accumulation_dtype(logits.dtype)) for shape in shapes
    )


@torch.library.custom_op(
    "rl_ops::logps_backward",
    mutates_args=(),
    schema="(Tensor grads, Tensor logits, Tensor index, Tensor stats, Tensor entropy, *,"
    " float scale) -> Tensor",
)
def _backward(
    grads: Tensor, logits: Tensor, index: Tensor, stats: Tensor, entropy: Tensor, *, scale: float
) -> Tensor:
    """Return the gradient of the logits; ``grads`` as :func:`join_grads` gives them."""
    z = rows_view(logits)
    lead, count = z.shape[:2], index.shape[-1]
    grad_logps, grad_entropy = split_grads(grads.reshape(*lead, grads.shape[-1]), count)
    maximum, sum_exp = stats.reshape(*lead, 2).unbind(-1)
    out = empty(logits.shape, logits.dtype, logits.device)
    kernels.logits_grad(
        z,
        index.reshape(*lead, count),
        (maximum, sum_exp),
        (grad_logps, grad_entropy),
        entropy=None if grad_entropy is None else entropy.reshape(lead),
        scale=scale,
        out=out.view(z.shape),
    )
    return out


@_backward.register_fake
def _(
    grads: Tensor, logits: Tensor, index: Tensor, stats: Tensor, entropy: Tensor, *, scale: float
) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, ...],
) -> None:
    logits, index = inputs
    _, entropy, stats = output
    ctx.options = keyword_only_inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, index, stats, entropy)


def _autograd(ctx: Any, grad_logps: Any, grad_entropy: Any, _: Any) -> tuple[Any, ...]:
    logits, index, stats, entropy = ctx.saved_tensors
    grads = join_grads(grad_logps, grad_entropy if ctx.options["entropy"] else None, index)
    if grads is None:
        return None, None
    scale = ctx.options["scale"]
    return _backward(grads, logits, index, stats, entropy, scale=scale), None


_forward.register_autograd(_autograd, setup_context=_setup_context)
_forward.register_vmap(fold(_forward))
_backward.register_vmap(fold(_backward))


def join_grads(
    grad_logps: Tensor | None, grad_entropy: Tensor | None, index: Tensor
) -> Tensor | None:
    """Put the gradients of log-probs and entropy into one ``[..., K]`` or ``[..., K + 1]``."""
    if grad_entropy is None:
        return grad_logps
    if grad_logps is None:
        grad_logps = grad_entropy.new_zeros(index.shape)
    return torch.cat([grad_logps, grad_entropy.unsqueeze(-1)], -1)


def split_grads(grads: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
    """Undo :func:`join_grads`."""
    return grads[..., :count], grads[..., count] if grads.shape[-1] > count else None


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
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature is {temperature}: pass a positive number (greedy has no log-probs)"
        )
    return 1.0 / temperature
