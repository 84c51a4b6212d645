"""Drawing the next token of many rows at once, each row from its own stream of random numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_trainers.rollouts.engine import SamplingParams

_SEED_SPACE = 2**63 - 1


def row_uniforms(rows: int, steps: int, *, seed: int) -> Tensor:
    """Uniform numbers ``[rows, steps]``, row ``i`` a function of ``(seed, i)`` alone.

    So a row samples the same whatever rows are drawn beside it, and however many there are.
    """
    generator = torch.Generator()
    uniforms = torch.empty(rows, steps, dtype=torch.float64)
    for row in range(rows):
        generator.manual_seed((seed * 1_000_003 + row * 7_919) % _SEED_SPACE)
        torch.rand(steps, generator=generator, dtype=torch.float64, out=uniforms[row])
    return uniforms


def sample_tokens(logits: Tensor, uniforms: Tensor, sampling: SamplingParams) -> Tensor:
    """Draw one token a row by inverting the cumulative distribution.

    Args:
        logits: ``[B, V]``, any float type.
        uniforms: ``[B]`` numbers in [0, 1), one a row.
        sampling: temperature and truncation.

    Returns:
        Token ids ``[B]``.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    probs = truncate(torch.softmax(logits.float() / sampling.temperature, dim=-1), sampling)
    cumulative = probs.cumsum(dim=-1)
    # Scaling by the row's own total makes rounding in the sum harmless: the draw stays inside
    # the row, and a token of probability 0 is never the first to reach the threshold.
    threshold = uniforms.to(cumulative).unsqueeze(-1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return torch.minimum(drawn, _last_possible(probs))


def truncate(probs: Tensor, sampling: SamplingParams) -> Tensor:
    """Set to 0 what top-k, top-p and min-p exclude; rows ``[B, V]`` are not renormalised."""
    if sampling.min_p > 0:
        likeliest = probs.amax(dim=-1, keepdim=True)
        probs = probs.masked_fill(probs < sampling.min_p * likeliest, 0.0)
    if sampling.top_k > 0 and sampling.top_k < probs.shape[-1]:
        kept = probs.topk(sampling.top_k, dim=-1)
        probs = torch.zeros_like(probs).scatter(-1, kept.indices, kept.values)
    if sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        mass_before = ordered.cumsum(dim=-1) - ordered
        total = ordered.sum(dim=-1, keepdim=True)
        ordered = ordered.masked_fill(mass_before >= sampling.top_p * total, 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    return probs


def _last_possible(probs: Tensor) -> Tensor:
    """Index ``[B]`` of the last token whose probability is above 0."""
    return probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(dim=-1)
