"""Log-probabilities straight from hidden states: the head and the log-softmax in one, in chunks.

Neither forward nor backward holds anything of the size of the logits, and a frozen weight costs no
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_ops._vmap import loop
from rl_ops.kernels import accumulation_dtype, linear
from rl_ops.kernels.memory import empty
from rl_ops.logprobs import (
    LogpsAndEntropy,
    check_bounds,
    join_grads,
    split_grads,
    token_index,
)

__all__ = ["linear_selective_log_softmax"]

# What forward keeps for backward.
KEEP_NOTHING, KEEP_LOGITS, KEEP_EXPECTED = 0, 1, 2


def linear_selective_log_softmax(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    adapter: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor | LogpsAndEntropy:
    """Return the log-probs of ``index`` under the head ``weight`` applied to ``hidden``.

    ``z = hidden @ weight.T + bias``; ``z = z * logit_scale``; ``z = c * tanh(z / c)`` with ``c =
    logit_softcap``; ``z = z / temperature``; then ``log_softmax(z)`` at ``index``. Gradients of
    hidden, weight, bias and adapter are exact. Under ``torch.autocast`` the products run in its
    type, as those of ``torch.nn.Linear`` would; sums over the vocabulary and over chunks are in
    float32.

    Args:
        hidden: ``[..., H]``.
        weight: ``[V, H]``, of the type of ``hidden`` unless autocast is on.
        index: ``[...]`` or ``[..., K]``, any integer type.
        bias: ``[V]``.
        temperature: positive.
        logit_softcap: positive (Gemma 2: 30).
        logit_scale: positive (Cohere: 0.0625; Granite divides, pass the inverse).
        return_entropy: also return the entropy of each row, in nats.
        adapter: ``(A [r, H], B [V, r], scaling)`` of a LoRA-wrapped head: the weight acts as
            ``weight + scaling * B @ A`` and is neither copied nor merged.

    Returns:
        Log-probs with the shape of ``index``, float32 (float64 for float64); with
        ``return_entropy`` a :class:`LogpsAndEntropy`.

    Raises:
        ValueError: shapes or types that do not belong together, or an option outside its range.
        IndexError: an index outside ``[0, V)`` (on an accelerator it gives NaN).

    Example:
        >>> hidden, weight = torch.ones(2, 4), torch.zeros(8, 4)
        >>> linear_selective_log_softmax(hidden, weight, torch.tensor([0, 7]))
        tensor([-2.0794, -2.0794])
    """
    index, squeeze = token_index("hidden", hidden, index)
    _check(hidden, weight, bias, adapter)
    _check_positive(temperature=temperature, logit_softcap=logit_softcap, logit_scale=logit_scale)
    lead = hidden.shape[:-1]
    dtype = _product_dtype(hidden, weight)
    flat = hidden.reshape(-1, hidden.shape[-1])
    low_rank: list[Tensor] = []
    if adapter is not None:
        down, up, scaling = adapter
        low_rank = [torch.nn.functional.linear(flat, down) * scaling, up]
    given = [x for x in (weight, bias, *low_rank) if x is not None]
    logps, entropy, *_ = _forward(
        flat,
        weight,
        index.reshape(-1, index.shape[-1]),
        bias,
        low_rank,
        scales=[1.0 / temperature, logit_scale, logit_softcap or 0.0],
        dtype=dtype,
        entropy=return_entropy,
        plan=_plan(hidden, given, logit_softcap, index.shape[-1]),
    )
    logps = logps.view(index.shape)
    logps = logps.squeeze(-1) if squeeze else logps
    return LogpsAndEntropy(logps, entropy.view(lead)) if return_entropy else logps


@torch.library.custom_op(
    "rl_ops::linear_logps_forward",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor index, Tensor? bias, Tensor[] low_rank, *,"
    " float[] scales, ScalarType dtype, bool entropy, int plan)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None,
    low_rank: list[Tensor],
    *,
    scales: list[float],
    dtype: torch.dtype,
    entropy: bool,
    plan: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs [N, K], entropy [N] or empty, [N, 2] maximum and sum of exp, the kept."""
    check_bounds(index, weight.shape[0])
    head = _head((hidden, weight, bias, *low_rank), scales, dtype)
    kept_shape = linear.kept_shape(head) if plan == KEEP_LOGITS else (0, head.rows, 0)
    kept = empty(kept_shape, dtype, hidden.device)
    expected_shape = hidden.shape if plan == KEEP_EXPECTED else (0,)
    expected = torch.zeros(expected_shape, dtype=accumulation_dtype(dtype), device=hidden.device)
    logps, rows = linear.forward(head, index, entropy=entropy, kept=kept, expected=expected)
    h = rows.entropy if rows.entropy is not None else logps.new_empty(0)
    stats = torch.stack([rows.maximum, rows.sum_exp], -1)
    return logps, h, stats, expected if plan == KEEP_EXPECTED else kept


@_forward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None,
    low_rank: list[Tensor],
    *,
    scales: list[float],
    dtype: torch.dtype,
    entropy: bool,
    plan: int,
) -> tuple[Tensor, ...]:
    rows = hidden.shape[0]
    wide = accumulation_dtype(dtype)
    shapes = index.shape, (rows if entropy else 0,), (rows, 2)
    results = [hidden.new_empty(shape, dtype=wide) for shape in shapes]
    if plan == KEEP_EXPECTED:
        return *results, hidden.new_empty(hidden.shape, dtype=wide)
    if plan == KEEP_NOTHING:
        return *results, hidden.new_empty((0, rows, 0), dtype=dtype)
    head = _head((hidden, weight, bias, *low_rank), scales, dtype)
    return *results, hidden.new_empty(linear.kept_shape(head), dtype=dtype)


@torch.library.custom_op(
    "rl_ops::linear_logps_backward",
    mutates_args=(),
    schema="(Tensor grads, Tensor?[] given, Tensor index, Tensor[] known, Tensor kept, *,"
    " float[] scales, ScalarType dtype, bool[] needs) -> Tensor[]",
)
def _backward(
    grads: Tensor,
    given: list[Tensor | None],
    index: Tensor,
    known: list[Tensor],
    kept: Tensor,
    *,
    scales: list[float],
    dtype: torch.dtype,
    needs: list[bool],
) -> list[Tensor]:
    """Return the gradients of ``given`` (hidden, weight, bias, low-rank pair) that are needed.

    ``grads`` as :func:`join_grads` gives them; ``known`` is the stats and the entropy of forward.
    """
    head = _head(given, scales, dtype)
    grad_logps, grad_entropy = split_grads(grads, index.shape[1])
    maximum, sum_exp = known[0].unbind(-1)
    rows = linear.Rows(index, maximum, sum_exp, None if grad_entropy is None else known[1])
    d_inputs, d_weights, d_bias = linear.backward(
        head,
        rows,
        (grad_logps, grad_entropy),
        kept=kept,
        needs=([needs[0], *needs[3:4]], [needs[1], *needs[4:5]], needs[2]),
    )
    found = d_inputs[0], d_weights[0], d_bias, *d_inputs[1:], *d_weights[1:]
    return [
        gradient.to(like.dtype)
        for gradient, like in zip(found, given, strict=True)
        if gradient is not None and like is not None
    ]


@_backward.register_fake
def _(
    grads: Tensor,
    given: list[Tensor | None],
    index: Tensor,
    known: list[Tensor],
    kept: Tensor,
    *,
    scales: list[float],
    dtype: torch.dtype,
    needs: list[bool],
) -> list[Tensor]:
    return [
        torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x, need in zip(given, needs, strict=True)
        if x is not None and need
    ]


def _setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, ...],
) -> None:
    hidden, weight, index, bias, low_rank = inputs
    ctx.options = keyword_only_inputs
    ctx.low_rank = len(low_rank)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(index, *output[1:], hidden, weight, bias, *low_rank)


def _autograd(ctx: Any, grad_logps: Any, grad_entropy: Any, *_: Any) -> tuple[Any, ...]:
    index, entropy, stats, kept, *given = ctx.saved_tensors
    options = {name: ctx.options[name] for name in ("scales", "dtype")}
    grads = join_grads(grad_logps, grad_entropy if ctx.options["entropy"] else None, index)
    if grads is None:
        return None, None, None, None, [None] * ctx.low_rank
    hidden, weight, _, bias, low_rank = ctx.needs_input_grad
    needs = [hidden, weight, bias, *(low_rank or [False] * ctx.low_rank)]
    if ctx.options["plan"] == KEEP_EXPECTED:
        if grads.shape == index.shape and needs == [True, False, False]:
            gradient = _hidden_grad(grads, (given[0], given[1], index), kept, options["scales"])
            return gradient, None, None, None, []
        kept = kept.new_empty((0, index.shape[0], 0), dtype=options["dtype"])
    gradients = iter(_backward(grads, given, index, [stats, entropy], kept, needs=needs, **options))
    found = [next(gradients) if need else None for need in needs]
    return found[0], found[1], None, found[2], found[3:]


def _hidden_grad(
    grads: Tensor, given: tuple[Tensor, Tensor, Tensor], expected: Tensor, scales: list[float]
) -> Tensor:
    """Return the gradient of ``hidden``, ``scale * g * (weight[index] - E[weight])``."""
    hidden, weight, index = given
    own = weight[index.squeeze(-1)].to(expected.dtype)
    gradient = (own - expected) * (grads * (scales[0] * scales[1]))
    return torch.where(grads == 0, 0.0, gradient).to(hidden.dtype)


_forward.register_autograd(_autograd, setup_context=_setup_context)
_forward.register_vmap(loop(_forward))
_backward.register_vmap(loop(_backward))


def _head(given: Sequence[Tensor | None], scales: list[float], dtype: torch.dtype) -> linear.Head:
    """Build the head of (hidden, weight, bias, low-rank pair)."""
    hidden, weight, bias, *low_rank = given
    inverse_temperature, logit_scale, softcap = scales
    return linear.Head(
        [x.to(dtype) for x in (hidden, *low_rank[:1]) if x is not None],
        [w for w in (weight, *low_rank[1:]) if w is not None],
        bias,
        logit_scale,
        softcap or None,
        inverse_temperature,
    )


def _plan(hidden: Tensor, given: list[Tensor], softcap: float | None, indices: int) -> int:
    """Choose what forward keeps: what spares backward most, nothing without gradient."""
    trained = any(x.requires_grad for x in given)
    if not torch.is_grad_enabled() or not (hidden.requires_grad or trained):
        return KEEP_NOTHING
    frozen = not trained and softcap is None and indices == 1
    return KEEP_EXPECTED if frozen else KEEP_LOGITS


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the type that the products run in: autocast's where it is on."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype}, weight {weight.dtype}: "
            "convert one, or call under torch.autocast"
        )
    return hidden.dtype


def _check(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapter: tuple[Tensor, Tensor, float] | None,
) -> None:
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight of shape {list(weight.shape)} for hidden of shape {list(hidden.shape)}: "
            "pass [V, H] as torch.nn.Linear keeps it"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {list(bias.shape)}: pass [V] = [{weight.shape[0]}]")
    if adapter is not None:
        down, up, _ = adapter
        ranks = down.shape[:1] == up.shape[1:]
        if not (ranks and down.shape[1:] == weight.shape[1:] and up.shape[:1] == weight.shape[:1]):
            raise ValueError(
                f"adapter of shapes {list(down.shape)}, {list(up.shape)} for a weight of "
                f"{list(weight.shape)}: pass A [r, H] and B [V, r]"
            )


def _check_positive(**options: float | None) -> None:
    for name, value in options.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}: pass a positive number")
