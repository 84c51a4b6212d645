"""Log-probabilities straight from hidden states: the head and the log-softmax in one, in chunks.

Neither forward nor backward holds anything of the size of the logits, and a frozen weight costs no
gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rl_ops._vmap import loop
from rl_ops.kernels import accumulation_dtype, linear
from rl_ops.kernels.memory import empty
from rl_ops.logprobs import LogpsAndEntropy, check_bounds, token_index

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
    low_hidden, low_weight = None, None
    if adapter is not None:
        down, low_weight, scaling = adapter
        low_hidden = torch.nn.functional.linear(flat, down) * scaling
    trained = [
        x for x in (weight, bias, low_hidden, low_weight) if x is not None and x.requires_grad
    ]
    logps, entropy, *_ = _forward(
        flat,
        weight,
        bias,
        low_hidden,
        low_weight,
        index.reshape(-1, index.shape[-1]),
        [1.0 / temperature, logit_scale, logit_softcap or 0.0],
        dtype,
        return_entropy,
        _plan(hidden, trained, logit_softcap, index.shape[-1]),
    )
    logps = logps.view(index.shape)
    logps = logps.squeeze(-1) if squeeze else logps
    return LogpsAndEntropy(logps, entropy.view(lead)) if return_entropy else logps


@torch.library.custom_op(
    "rl_ops::linear_logps_forward",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor? low_hidden, Tensor? low_weight,"
    " Tensor index, float[] scales, ScalarType dtype, bool entropy, int plan)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low_hidden: Tensor | None,
    low_weight: Tensor | None,
    index: Tensor,
    scales: list[float],
    dtype: torch.dtype,
    entropy: bool,
    plan: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs [N, K], entropy [N] or empty, maximum, sum_exp, what the plan keeps."""
    check_bounds(index, weight.shape[0])
    head = _head((hidden, low_hidden), (weight, low_weight), bias, scales, dtype)
    kept_shape = linear.kept_shape(head) if plan == KEEP_LOGITS else (0, head.rows, 0)
    kept = empty(kept_shape, dtype, hidden.device)
    expected_shape = hidden.shape if plan == KEEP_EXPECTED else (0,)
    expected = torch.zeros(expected_shape, dtype=accumulation_dtype(dtype), device=hidden.device)
    logps, rows = linear.forward(head, index, entropy=entropy, kept=kept, expected=expected)
    h = rows.entropy if rows.entropy is not None else logps.new_empty(0)
    return logps, h, rows.maximum, rows.sum_exp, expected if plan == KEEP_EXPECTED else kept


@_forward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Any,
    low_hidden: Any,
    low_weight: Any,
    index: Tensor,
    scales: list[float],
    dtype: torch.dtype,
    entropy: bool,
    plan: int,
) -> tuple[Tensor, ...]:
    rows = hidden.shape[:1]
    shapes = index.shape, rows if entropy else (0,), rows, rows
    results = [hidden.new_empty(shape, dtype=accumulation_dtype(dtype)) for shape in shapes]
    if plan == KEEP_EXPECTED:
        return *results, hidden.new_empty(hidden.shape, dtype=accumulation_dtype(dtype))
    if plan == KEEP_NOTHING:
        return *results, hidden.new_empty((0, rows[0], 0), dtype=dtype)
    head = _head((hidden, low_hidden), (weight, low_weight), bias, scales, dtype)
    return *results, hidden.new_empty(linear.kept_shape(head), dtype=dtype)


@torch.library.custom_op(
    "rl_ops::linear_logps_backward",
    mutates_args=(),
    schema="(Tensor? grad_logps, Tensor? grad_entropy, Tensor hidden, Tensor weight, Tensor? bias,"
    " Tensor? low_hidden, Tensor? low_weight, Tensor index, Tensor maximum, Tensor sum_exp,"
    " Tensor entropy, Tensor kept, float[] scales, ScalarType dtype, bool[] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low_hidden: Tensor | None,
    low_weight: Tensor | None,
    index: Tensor,
    maximum: Tensor,
    sum_exp: Tensor,
    entropy: Tensor,
    kept: Tensor,
    scales: list[float],
    dtype: torch.dtype,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the first five tensors; empty where not needed."""
    head = _head((hidden, low_hidden), (weight, low_weight), bias, scales, dtype)
    rows = linear.Rows(index, maximum, sum_exp, None if grad_entropy is None else entropy)
    pairs = len(head.inputs)
    d_inputs, d_weights, d_bias = linear.backward(
        head,
        rows,
        (grad_logps, grad_entropy),
        kept=kept,
        needs=([needs[0], needs[3]][:pairs], [needs[1], needs[4]][:pairs], needs[2]),
    )
    found = d_inputs[0], d_weights[0], d_bias, *d_inputs[1:], *d_weights[1:]
    asked = hidden, weight, bias, low_hidden, low_weight
    result = [
        hidden.new_empty(0) if gradient is None or like is None else gradient.to(like.dtype)
        for gradient, like in zip((*found, None, None)[:5], asked, strict=True)
    ]
    return tuple(result)  # type: ignore[return-value]


@_backward.register_fake
def _(
    grad_logps: Any,
    grad_entropy: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Any,
    low_hidden: Any,
    low_weight: Any,
    *rest: Any,
) -> tuple[Tensor, ...]:
    asked = hidden, weight, bias, low_hidden, low_weight
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format)
        if x is not None and need
        else hidden.new_empty(0)
        for x, need in zip(asked, rest[-1], strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scales, ctx.dtype, ctx.with_entropy, ctx.plan = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:])


def _autograd(ctx: Any, grad_logps: Any, grad_entropy: Any, *_: Any) -> tuple[Any, ...]:
    tensors, (entropy, maximum, sum_exp, kept) = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
    nothing = (None,) * 10
    if not ctx.with_entropy:
        grad_entropy = None
    if grad_logps is None and grad_entropy is None:
        return nothing
    needs = list(ctx.needs_input_grad[:5])
    if ctx.plan == KEEP_EXPECTED:
        if grad_entropy is None and needs == [True, False, False, False, False]:
            return _hidden_grad(grad_logps, tensors, kept, ctx), *nothing[1:]
        kept = kept.new_empty((0, maximum.shape[0], 0), dtype=ctx.dtype)
    known = (*tensors, maximum, sum_exp, entropy, kept)
    gradients = _backward(grad_logps, grad_entropy, *known, ctx.scales, ctx.dtype, needs)
    found = [g if need else None for g, need in zip(gradients, needs, strict=True)]
    return *found, *nothing[5:]


def _hidden_grad(
    grad_logps: Tensor, tensors: tuple[Any, ...], expected: Tensor, ctx: Any
) -> Tensor:
    """Return the gradient of ``hidden``, ``scale * g * (weight[index] - E[weight])``."""
    hidden, weight, index = tensors[0], tensors[1], tensors[5]
    scale = ctx.scales[0] * ctx.scales[1]
    own = weight[index.squeeze(-1)].to(expected.dtype)
    gradient = (own - expected) * (grad_logps * scale)
    return torch.where(grad_logps == 0, 0.0, gradient).to(hidden.dtype)


_forward.register_autograd(_autograd, setup_context=_setup_context)
_forward.register_vmap(loop(_forward))
_backward.register_vmap(loop(_backward))


def _head(
    inputs: tuple[Tensor, Tensor | None],
    weights: tuple[Tensor, Tensor | None],
    bias: Tensor | None,
    scales: list[float],
    dtype: torch.dtype,
) -> linear.Head:
    inverse_temperature, logit_scale, softcap = scales
    return linear.Head(
        [x.to(dtype) for x in inputs if x is not None],
        [w for w in weights if w is not None],
        bias,
        logit_scale,
        softcap or None,
        inverse_temperature,
    )


def _plan(hidden: Tensor, trained: list[Tensor], softcap: float | None, indices: int) -> int:
    """Choose what forward keeps: what spares backward most, nothing without gradient."""
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
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}: pass a positive number")
