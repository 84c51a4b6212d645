"""The row kernels in Triton, for CUDA, ROCm and XPU: online softmax, any vocabulary, any strides.

Bytes moved for logits of ``n`` bytes: forward reads ``n``, backward reads ``n`` and writes ``n``;
all else is a few numbers a row. The kernels run on CPU tensors too under ``TRITON_INTERPRET=1``,
which is how they are tested.
"""

# ruff: noqa: ANN001, ANN202, N803
# mypy: disable-error-code="no-untyped-def"
# Triton reads a kernel's annotations as types of its own and wants constants in capitals.

from __future__ import annotations

import contextlib
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = math.log2(math.e)
BLOCK = 4096
WARPS = 8


@triton.jit
def _row_stats_kernel(
    z_ptr,
    maximum_ptr,
    sum_exp_ptr,
    sum_exp_d_ptr,
    inner,
    width,
    outer_stride,
    inner_stride,
    stride,
    factor,
    ENTROPY: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Reduce one row: maximum, ``sum(2**u)``, ``sum(2**u * u)``, ``u = (z - maximum) * factor``."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row // inner * outer_stride + row % inner * inner_stride
    top = -float("inf")
    total = 0.0
    total_u = 0.0
    for start in range(0, width, SIZE):
        columns = start + tl.arange(0, SIZE)
        inside = columns < width
        z = tl.load(z_ptr + columns.to(tl.int64) * stride, mask=inside, other=-float("inf"))
        z = z.to(tl.float32)
        new_top = tl.maximum(top, tl.max(z, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        # bounded below, so that exp2(-inf) * -inf is 0 and not NaN
        shift = tl.maximum((top - base) * factor, -1e4)
        u = (z - base) * factor
        e = tl.exp2(u)
        shrink = tl.exp2(shift)
        if ENTROPY:
            bounded = tl.where(u < -1e4, -1e4, u)
            total_u = (total_u + total * shift) * shrink + tl.sum(e * bounded, 0)
        total = total * shrink + tl.sum(e, 0)
        top = new_top
    tl.store(maximum_ptr + row, top)
    tl.store(sum_exp_ptr + row, total)
    if ENTROPY:
        tl.store(sum_exp_d_ptr + row, total_u)


@triton.jit
def _logits_grad_kernel(
    z_ptr,
    index_ptr,
    maximum_ptr,
    sum_exp_ptr,
    grad_logps_ptr,
    grad_entropy_ptr,
    entropy_ptr,
    out_ptr,
    inner,
    width,
    outer_stride,
    inner_stride,
    stride,
    scale,
    factor,
    indices,
    LOGPS: tl.constexpr,
    ENTROPY: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program a block of a row: reads it, writes its gradient."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    z_ptr += row // inner * outer_stride + row % inner * inner_stride
    top = tl.load(maximum_ptr + row)
    total = tl.load(sum_exp_ptr + row)
    grad_sum = 0.0
    active = 0.0
    if LOGPS:
        for k in range(indices):
            g = tl.load(grad_logps_ptr + row * indices + k)
            grad_sum += g
            # a NaN is not 0 and keeps the row alive
            active = tl.where(g == 0.0, active, 1.0)
    grad_entropy = 0.0
    offset = grad_sum
    if ENTROPY:
        grad_entropy = tl.load(grad_entropy_ptr + row)
        active = tl.where(grad_entropy == 0.0, active, 1.0)
        offset += grad_entropy * (tl.load(entropy_ptr + row) - tl.log(total))
    inside = columns < width
    # a row without gradient is not read, so nothing that it holds reaches the result
    read = columns < tl.where(active > 0.0, width, 0)
    z = tl.load(z_ptr + columns.to(tl.int64) * stride, mask=read, other=-float("inf")).to(
        tl.float32
    )
    base = tl.where(top == -float("inf"), 0.0, top)
    u = (z - base) * factor
    e = tl.exp2(u)
    result = e * (-scale / total * offset)
    if ENTROPY:
        bounded = tl.where(u < -1e4, -1e4, u)
        result -= e * bounded * (scale / total * grad_entropy / 1.4426950408889634)
    if LOGPS:
        for k in range(indices):
            at = tl.load(index_ptr + row * indices + k)
            g = tl.load(grad_logps_ptr + row * indices + k)
            result += tl.where(columns == at, g * scale, 0.0)
    result = tl.where(active > 0.0, result, 0.0)
    out = out_ptr + row * width + columns
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=inside)


def row_stats(z: Tensor, *, scale: float, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`rl_ops.kernels.row_stats`."""
    lead = z.shape[:2]
    maximum, sum_exp = (torch.empty(lead, dtype=torch.float32, device=z.device) for _ in range(2))
    sum_exp_d = torch.empty(lead if entropy else (0,), dtype=torch.float32, device=z.device)
    if maximum.numel():
        with _device(z):
            _row_stats_kernel[(maximum.numel(),)](
                z,
                maximum,
                sum_exp,
                sum_exp_d,
                z.shape[1],
                z.shape[2],
                *z.stride(),
                scale * LOG2E,
                ENTROPY=entropy,
                SIZE=_block(z),
                num_warps=WARPS,
            )
    return maximum, sum_exp, sum_exp_d.div_(LOG2E)


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
    rows = z.shape[0] * z.shape[1]
    if rows == 0:
        return
    maximum, sum_exp, *rest = (
        None if x is None else x.float().contiguous() for x in (*stats, *grads, entropy)
    )
    # a pointer that is not followed stands for what is not given
    grad_logps, grad_entropy, known_entropy = (maximum if x is None else x for x in rest)
    with _device(z):
        _logits_grad_kernel[(rows, triton.cdiv(z.shape[2], _block(z)))](
            z,
            index.contiguous(),
            maximum,
            sum_exp,
            grad_logps,
            grad_entropy,
            known_entropy,
            out,
            z.shape[1],
            z.shape[2],
            *z.stride(),
            scale,
            scale * LOG2E,
            index.shape[2],
            LOGPS=grads[0] is not None,
            ENTROPY=grads[1] is not None,
            SIZE=_block(z),
            num_warps=WARPS,
        )


def _block(z: Tensor) -> int:
    return min(BLOCK, max(16, triton.next_power_of_2(z.shape[2])))


def _device(z: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the device of ``z`` the current one: Triton launches there."""
    if z.device.type == "cuda":
        return torch.cuda.device(z.device)
    if z.device.type == "xpu":
        return torch.xpu.device(z.device)
    return contextlib.nullcontext()
