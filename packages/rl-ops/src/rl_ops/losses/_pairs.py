"""What the losses on pairs share."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def per_token(values: Tensor, lengths: Tensor) -> Tensor:
    """Return summed log-probs ``[B]`` as averages over each row's tokens."""
    if lengths.shape != values.shape:
        raise ValueError(f"lengths have shape {list(lengths.shape)}, expected {list(values.shape)}")
    return values / lengths.clamp(min=1).to(values.dtype)


def smoothing(label_smoothing: float) -> float:
    """Check the probability of a flipped label."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}: pass one in [0, 0.5)")
    return label_smoothing


def smoothed_logistic(z: Tensor, label_smoothing: float) -> Tensor:
    """Return ``-(1 - e) * log sigmoid(z) - e * log sigmoid(-z)``."""
    e = smoothing(label_smoothing)
    loss = -logsigmoid(z)
    return loss if e == 0 else (1 - e) * loss - e * logsigmoid(-z)
