"""Sampled and scored completions, and how a window of them is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rl_decode import Completion
from rl_models import CompletionBatch
from rl_ops import pad
from rl_trainers.rollouts import Rollout


@dataclass
class Group:
    """One prompt and its completions.

    Attributes:
        row: the dataset row.
        prompt_ids: the rendered prompt.
        prompt: what reward functions see of it (text, or messages).
        rollouts: the sampled completions, ``G`` of them.
        completions: the same, decoded.
        rewards: ``[G]`` totals, NaN where not scorable.
        rewards_by_function: ``[G, F]``.
        advantages: ``[G]``.
        old_logps: ``[T]`` for each completion, or ``None`` while they are the current policy's.
    """

    row: dict[str, Any]
    prompt_ids: list[int]
    prompt: Any
    rollouts: list[Rollout]
    completions: list[Completion]
    rewards: Tensor = field(default_factory=lambda: torch.empty(0))
    rewards_by_function: Tensor = field(default_factory=lambda: torch.empty(0))
    advantages: Tensor = field(default_factory=lambda: torch.empty(0))
    old_logps: list[Tensor] | None = None
    trained: list[bool] = field(default_factory=list)

    @property
    def has_signal(self) -> bool:
        """Whether a trained completion has an advantage other than 0."""
        return any(t and a != 0 for t, a in zip(self.trained, self.advantages, strict=True))


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward needs.

    Attributes:
        batch: token ids of ``P`` prompts and ``N`` completions of at most ``T`` tokens.
        mask: ``[N, T]`` tokens that are trained.
        advantages: ``[N]`` float32.
        old_logps: ``[N, T]``, or ``None`` where they are the current policy's own.
        engine_logps: ``[N, T]`` as the engine reported them.
    """

    batch: CompletionBatch
    mask: Tensor
    advantages: Tensor
    old_logps: Tensor | None
    engine_logps: Tensor


def collate_groups(groups: Sequence[Group], *, pad_token_id: int, device: Any) -> MicroBatch:
    """Pad ``groups`` into one micro-batch on ``device``."""
    index = [i for i, group in enumerate(groups) for _ in group.rollouts]
    ids = [rollout.ids for group in groups for rollout in group.rollouts]
    batch = CompletionBatch.from_ids(
        [group.prompt_ids for group in groups], ids, index, pad_token_id=pad_token_id, device=device
    )
    trained = torch.tensor([t for group in groups for t in group.trained], device=device)
    engine = [torch.tensor(r.logps) for group in groups for r in group.rollouts]
    old = [logps for group in groups for logps in group.old_logps or []]
    return MicroBatch(
        batch=batch,
        mask=batch.real() & trained.unsqueeze(-1),
        advantages=torch.cat([group.advantages for group in groups]).to(device, torch.float32),
        old_logps=pad(old).to(device) if old else None,
        engine_logps=pad(engine).to(device),
    )


def split_evenly(groups: Sequence[Group], parts: int) -> list[list[Group]]:
    """Cut ``groups`` into ``parts`` lists whose lengths differ by one at most.

    Example:
        >>> [len(part) for part in split_evenly(["a", "b", "c", "d", "e"], 3)]
        [2, 2, 1]
    """
    short, longer = divmod(len(groups), parts)
    cuts = [0]
    for part in range(parts):
        cuts.append(cuts[-1] + short + (part < longer))
    return [list(groups[a:b]) for a, b in pairwise(cuts)]
