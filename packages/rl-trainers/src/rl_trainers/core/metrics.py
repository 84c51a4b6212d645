"""Means over everything seen since the last log line, exact over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Metrics:
    """Sums and counts by name; a mean is formed once, when it is read.

    Means of means would weigh a short micro-batch like a long one; a sum and a count do not.

    Example:
        >>> metrics = Metrics()
        >>> metrics.add("reward", 3.0, count=2)
        >>> metrics.add("reward", 0.0, count=1)
        >>> metrics.drain()
        {'reward': 1.0}
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}

    def add(self, name: str, total: float | Tensor, count: float | Tensor = 1.0) -> None:
        """Add ``total``, the sum over ``count`` things; a count of 0 leaves no trace."""
        if float(count) == 0:
            return
        self._sums[name] = self._sums.get(name, 0.0) + float(total)
        self._counts[name] = self._counts.get(name, 0.0) + float(count)

    def add_values(self, name: str, values: Tensor) -> None:
        """Add every element of ``values`` that is not NaN."""
        values = values.detach()
        kept = values[~values.isnan()]
        self.add(name, kept.double().sum(), kept.numel())

    def drain(self, reduce_sum: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """Return the means and start anew.

        Args:
            reduce_sum: sums a float64 tensor over the ranks; every rank must hold the same
                names, which they do when they run the same code.
        """
        names = sorted(self._sums)
        if not names:
            return {}
        table = torch.tensor(
            [[self._sums[name] for name in names], [self._counts[name] for name in names]],
            dtype=torch.float64,
        )
        if reduce_sum is not None:
            table = reduce_sum(table)
        self._sums.clear()
        self._counts.clear()
        sums, counts = table.tolist()
        return {name: s / c for name, s, c in zip(names, sums, counts, strict=True)}
