"""Supervised fine-tuning losses, per token."""

from __future__ import annotations

from torch import Tensor

from rl_ops.losses._inputs import masked_inputs

__all__ = ["dft", "nll"]


def nll(logps: Tensor, mask: Tensor) -> Tensor:
    """Negative log-likelihood ``-log p(y_t)``.

    Args:
        logps: ``[B, T]`` log-probs of the target tokens.
        mask: ``[B, T]``, non-zero where a token is trained.

    Returns:
        ``[B, T]``, 0 where masked.

    Example:
        >>> nll(torch.tensor([[-2.0, -1.0]]), torch.tensor([[1, 0]]))
        tensor([[2., 0.]])
    """
    (logps,) = masked_inputs(mask, logps=logps)
    return 0 - logps


def dft(logps: Tensor, mask: Tensor) -> Tensor:
    """Dynamic fine-tuning: ``-sg(p(y_t)) * log p(y_t)``, sg stopping the gradient.

    Wu et al. 2025, "On the Generalization of SFT" (arXiv:2508.05629, equation 9). Arguments as
    :func:`nll`.
    """
    (logps,) = masked_inputs(mask, logps=logps)
    return -logps.detach().exp() * logps
