"""The one comparison that every numeric test uses; it refuses tolerances that prove nothing."""

from __future__ import annotations

from typing import Any

LOOSEST = 1e-2


def assert_close(actual: Any, expected: Any, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Assert that two tensors (or numbers, or nested lists) agree in value and shape.

    The values are compared in float64, so neither side's dtype hides a difference.

    Raises:
        ValueError: a tolerance looser than 1e-2, at which a comparison stops being evidence.
        AssertionError: the values differ; the message names the largest difference.
    """
    import torch

    if max(rtol, atol) > LOOSEST:
        raise ValueError(
            f"rtol={rtol}, atol={atol}: looser than {LOOSEST} proves nothing; "
            "compute a better expected value instead"
        )
    as_float64 = [torch.as_tensor(x).detach().to("cpu", torch.float64) for x in (actual, expected)]
    torch.testing.assert_close(*as_float64, rtol=rtol, atol=atol, equal_nan=True)
