"""The two row kernels that everything else is made of, one file a backend.

``row_stats`` reads logits once and returns what a softmax needs; ``logits_grad`` writes the one
gradient owed. Both take ``z`` as ``[B, T, V]`` with any strides. Compiled C++ serves the CPU,
Triton the GPUs, plain torch everything else.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from rl_ops.kernels import cpu, eager

TRITON_DEVICES = ("cuda", "xpu")  # ROCm calls itself cuda


class RowStats(NamedTuple):
    """Softmax statistics of each row ``[B, T]``, in float32, or float64 for float64.

    With ``d = (z - maximum) * scale``: ``sum_exp = sum(exp(d))`` and
    ``sum_exp_d = sum(exp(d) * d)`` (empty unless asked for).
    """

    maximum: Tensor
    sum_exp: Tensor
    sum_exp_d: Tensor


def row_stats(z: Tensor, *, scale: float, entropy: bool) -> RowStats:
    """Return the softmax statistics of each row of ``z`` ``[B, T, V]``, reading it once."""
    return RowStats(*_backend(z).row_stats(z, scale=scale, entropy=entropy))


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
    """Write the gradient of log-probs and entropy with respect to ``z`` into ``out``.

    Args:
        z: logits ``[B, T, V]``, any strides.
        index: ``[B, T, K]`` int64; one outside ``[0, V)`` selects nothing (a chunk of a larger
            row).
        stats: the maximum and the sum of exponentials of the whole row, ``[B, T]``.
        grads: gradient of the log-probs ``[B, T, K]`` and of the entropy ``[B, T]``, either None.
        entropy: the row's entropy ``[B, T]``, needed with a gradient of the entropy.
        scale: what the logits are multiplied by, 1 / temperature.
        out: contiguous ``[B, T, V]`` of the type of ``z``; may be ``z`` itself.
    """
    backend = _backend(z, index.shape[2])
    backend.logits_grad(z, index, stats, grads, entropy=entropy, scale=scale, out=out)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that sums over the vocabulary are held in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _backend(z: Tensor, indices: int = 0) -> ModuleType:
    """Return the module that serves this tensor."""
    if z.device.type in TRITON_DEVICES and z.dtype != torch.float64 and _has_triton():
        from rl_ops.kernels import triton

        return triton
    return cpu if cpu.supports(z, indices) else eager


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
