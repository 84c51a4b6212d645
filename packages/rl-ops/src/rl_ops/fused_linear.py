"""Log-probabilities straight from hidden states: the head and the log-softmax in chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_ops.logprobs import LogpsAndEntropy, logps_and_entropy, selective_log_softmax

__all__ = ["linear_selective_log_softmax"]


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
) -> Tensor | LogpsAndEntropy:
    """Return the log-probs of ``index`` under the head ``weight`` applied to ``hidden``."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    if return_entropy:
        return logps_and_entropy(logits, index, temperature=temperature)
    return selective_log_softmax(logits, index, temperature=temperature)
