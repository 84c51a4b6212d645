"""The clipped surrogate that most policy losses share."""

from __future__ import annotations

import torch
from torch import Tensor

Bounds = tuple[float, float, float | None]


def bounds_of(epsilon: float, epsilon_high: float | None, delta: float | None) -> Bounds:
    """Return the clip range of the ratio and the bound of the unclipped one."""
    high = epsilon if epsilon_high is None else epsilon_high
    if epsilon < 0 or high < 0:
        raise ValueError(f"epsilon={epsilon}, epsilon_high={high}: pass 0 or more")
    if delta is not None and delta <= 1 + high:
        raise ValueError(
            f"delta={delta} must exceed 1 + epsilon_high = {1 + high}, or the clip never acts"
        )
    return 1 - epsilon, 1 + high, delta


def surrogate(ratio: Tensor, advantages: Tensor, bounds: Bounds) -> Tensor:
    """Return ``-min(ratio * A, clip(ratio) * A)``."""
    low, high, delta = bounds
    clipped = ratio.clamp(low, high) * advantages
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    return 0 - torch.minimum(ratio * advantages, clipped)
