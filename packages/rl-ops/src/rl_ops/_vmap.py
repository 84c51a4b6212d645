"""``torch.vmap`` rules for the custom ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Rule = Callable[..., tuple[tuple[Tensor, ...], tuple[int, ...]]]


def fold(op: Callable[..., Any]) -> Rule:
    """Return the rule of an op that takes any number of leading dimensions: one call."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any) -> Any:
        moved = [_batched(x, dim, info.batch_size) for x, dim in zip(args, in_dims, strict=True)]
        result = op(*moved, **options)
        single = isinstance(result, Tensor)
        outputs = (result,) if single else result
        # an output that was not asked for is empty, whatever the batch
        outputs = tuple(
            x.expand(info.batch_size, 0) if x.shape == (0,) and info.batch_size else x
            for x in outputs
        )
        return (outputs[0], 0) if single else (outputs, (0,) * len(outputs))

    return rule


def loop(op: Callable[..., tuple[Tensor, ...]]) -> Rule:
    """Return the rule of an op that takes no leading dimensions: a call for each entry."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any) -> Any:
        calls = [
            op(*(_entry(x, dim, i) for x, dim in zip(args, in_dims, strict=True)), **options)
            for i in range(info.batch_size)
        ]
        outputs = [torch.stack(parts) for parts in zip(*calls, strict=True)]
        if isinstance(calls[0], tuple):
            return tuple(outputs), (0,) * len(outputs)
        return outputs, [0] * len(outputs)

    return rule


def _batched(x: Any, dim: int | None, size: int) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _entry(x: Any, dim: Any, i: int) -> Any:
    if isinstance(x, (list, tuple)):
        dims = [None] * len(x) if dim is None else dim
        return [_entry(part, d, i) for part, d in zip(x, dims, strict=True)]
    return x.select(dim, i) if isinstance(x, Tensor) and dim is not None else x
