"""What is logged of sampled groups and their rewards."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from rl_trainers.core.metrics import Metrics
from rl_trainers.online.window import Group
from rl_trainers.rewards import ScoredRewards


def measure_rewards(metrics: Metrics, scored: ScoredRewards, prefix: str) -> None:
    """The mean total, the mean of each function, and how many could not be scored, with reasons."""
    metrics.add_values(f"{prefix}reward", scored.total)
    for column, name in enumerate(scored.names):
        metrics.add_values(f"{prefix}rewards/{name}", scored.by_function[:, column])
    metrics.add(f"{prefix}not_scorable", scored.total.isnan().sum(), scored.total.numel())
    for reason, times in scored.failures.items():
        warnings.warn(f"a reward was not given {times} times: {reason}", stacklevel=2)


def measure_groups(metrics: Metrics, groups: Sequence[Group]) -> None:
    """Lengths, finish reasons, and the share of groups whose advantages are all 0."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for reason in ("stop", "length"):
        ended = sum(rollout.finish_reason == reason for rollout in rollouts)
        metrics.add(f"finish_reason/{reason}", ended, len(rollouts))
    lengths = torch.tensor([len(rollout.ids) for rollout in rollouts], dtype=torch.float64)
    metrics.add_values("completion_length", lengths)
    silent = sum(not group.has_signal for group in groups)
    metrics.add("groups_without_signal", silent, len(groups))
