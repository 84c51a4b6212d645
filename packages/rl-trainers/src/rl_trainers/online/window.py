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
        ref_logps: the same of the reference policy, where one is used.
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
    ref_logps: list[Tensor] | None = None
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
        ref_logps: ``[N, T]`` or ``None``.
        engine_logps: ``[N, T]`` as the engine reported them.
        groups: the groups it is made of.
    """

    batch: CompletionBatch
    mask: Tensor
    advantages: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor | None
    engine_logps: Tensor
    groups: Sequence[Group]


def collate_groups(groups: Sequence[Group], *, pad_token_id: int, device: Any) -> MicroBatch:
    """Pad ``groups`` into one micro-batch on ``device``."""
    index = [i for i, group in enumerate(groups) for _ in group.rollouts]
    ids = [rollout.ids for group in groups for rollout in group.rollouts]
    batch = CompletionBatch.from_ids(
        [group.prompt_ids for group in groups], ids, index, pad_token_id=pad_token_id, device=device
    )
    width = batch.completion_ids.shape[1]
    lengths = torch.tensor([len(row) for row in ids], device=device)
    trained = torch.tensor([t for group in groups for t in group.trained], device=device)
    mask = (torch.arange(width, device=device) < lengths.unsqueeze(-1)) & trained.unsqueeze(-1)
    engine = [torch.tensor(r.logps) for group in groups for r in group.rollouts]
    return MicroBatch(
        batch=batch,
        mask=mask,
        advantages=torch.cat([group.advantages for group in groups]).to(device, torch.float32),
        old_logps=_stack([group.old_logps for group in groups], width, device),
        ref_logps=_stack([group.ref_logps for group in groups], width, device),
        engine_logps=_pad_rows(engine, width, device),
        groups=groups,
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


def _stack(rows: Sequence[list[Tensor] | None], width: int, device: Any) -> Tensor | None:
    if any(row is None for row in rows):
        return None
    return _pad_rows([logps for row in rows if row is not None for logps in row], width, device)


def _pad_rows(rows: Sequence[Tensor], width: int, device: Any) -> Tensor:
    padded = torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded.to(device)
