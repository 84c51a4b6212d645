"""What a rollout engine is asked for and what it returns: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn.

    Attributes:
        max_new_tokens: most tokens of one completion, its stop token included.
        temperature: the logits are divided by it; 0 takes the likeliest token.
        top_k: only the ``top_k`` likeliest tokens can be drawn; 0 admits all.
        top_p: only the smallest set of tokens with at least this probability can be drawn.
        min_p: only tokens with at least this share of the likeliest one's probability.

    Raises:
        ValueError: a value outside its range, named with what was seen.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        wanted = {
            "max_new_tokens": (self.max_new_tokens >= 1, "an integer of at least 1"),
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0 (0 admits every token)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
        }
        for name, (holds, range_in_words) in wanted.items():
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)}: must be {range_in_words}")


@dataclass(frozen=True)
class Rollout:
    """One sampled completion.

    Attributes:
        prompt_index: which of the prompts it continues.
        ids: its token ids, the stop token included where one was sampled.
        logps: for each id its log-probability under the policy at the sampling temperature,
            before top-k, top-p and min-p cut the distribution: the quantity that the trainer
            scores, so that the two can be compared.
        finish_reason: ``"stop"`` when a stop id ended it, ``"length"`` when the limit did.
    """

    prompt_index: int
    ids: list[int]
    logps: list[float]
    finish_reason: str


class RolloutEngine(Protocol):
    """Anything that continues prompts given as token ids.

    ``generate`` returns ``n`` rollouts for each prompt, those of one prompt next to each other
    and the prompts in their order. Equal arguments and weights give equal samples, and a
    sample depends on its prompt, its place in the group and the seed alone.
    """

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingParams, *, seed: int
    ) -> list[Rollout]:
        """Continue each prompt ``n`` times."""
        ...

    def sync_weights(self, model: nn.Module) -> None:
        """Take over the weights of ``model``, leaving them untouched."""
        ...
