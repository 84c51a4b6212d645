"""Which prompts are sampled when, on which rank, and how often their completions are reused.

A *window* is what is generated at once: the prompts of ``steps_per_generation`` micro-steps on
every rank. Its micro-steps are run ``num_iterations`` times. Windows are cut from an endless
stream of permutations of the dataset, so an epoch's last window is filled up with the first
prompts of the next permutation and no prompt is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The sizes of a run, all in prompts.

    Attributes:
        num_prompts: rows of the dataset.
        prompts_per_micro_step: prompts of one forward and backward on one rank.
        micro_steps_per_window: micro-steps whose prompts are generated at once.
        num_iterations: how often a window's completions are trained on.
        num_ranks: processes; each generates the groups it trains on.
        seed: of the permutations.

    Example:
        >>> plan = Plan(num_prompts=5, prompts_per_micro_step=1, micro_steps_per_window=2,
        ...             num_iterations=1, num_ranks=1, seed=0, shuffle=False)
        >>> [plan.window(w, rank=0) for w in range(3)]
        [[0, 1], [2, 3], [4, 0]]
    """

    num_prompts: int
    prompts_per_micro_step: int
    micro_steps_per_window: int
    num_iterations: int
    num_ranks: int
    seed: int
    shuffle: bool = True

    @property
    def window_prompts(self) -> int:
        """Prompts of one window on one rank."""
        return self.prompts_per_micro_step * self.micro_steps_per_window

    @property
    def windows_per_epoch(self) -> int:
        """Windows that hold every prompt at least once."""
        return -(-self.num_prompts // (self.window_prompts * self.num_ranks))

    @property
    def micro_steps_per_epoch(self) -> int:
        """Forward-backward passes of one epoch on one rank."""
        return self.windows_per_epoch * self.micro_steps_per_window * self.num_iterations

    def window(self, number: int, *, rank: int) -> list[int]:
        """Dataset rows of window ``number`` (counted over all epochs) on ``rank``."""
        size = self.window_prompts
        start = (number * self.num_ranks + rank) * size
        return [self._at(place) for place in range(start, start + size)]

    def _at(self, place: int) -> int:
        pass_number, offset = divmod(place, self.num_prompts)
        return self._permutation(pass_number)[offset]

    def _permutation(self, pass_number: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_prompts))
        return _permutation(self.num_prompts, self.seed + pass_number)

    def __str__(self) -> str:
        return (
            f"{self.num_prompts} prompts; a window of {self.window_prompts} prompts on each of "
            f"{self.num_ranks} ranks is generated at once, cut into "
            f"{self.micro_steps_per_window} micro-steps of {self.prompts_per_micro_step} prompts "
            f"and trained on {self.num_iterations} times; {self.windows_per_epoch} windows an epoch"
        )


_cached: dict[tuple[int, int], list[int]] = {}


def _permutation(size: int, seed: int) -> list[int]:
    if (size, seed) not in _cached:
        while len(_cached) >= 2:  # a window touches two passes at most times
            _cached.pop(next(iter(_cached)))
        generator = torch.Generator().manual_seed(seed)
        _cached[size, seed] = torch.randperm(size, generator=generator).tolist()
    return _cached[size, seed]


class WindowSampler(Sampler[list[int]]):
    """Yields, for each micro-step of an epoch, the rows of the window it belongs to.

    The same rows come once a micro-step, so that a run resumed inside a window has them at hand.

    Args:
        plan: the sizes.
        rank: of this process.
        epoch: called at the start of each epoch for its number. The trainer counts it from its
            optimiser steps, so that a resumed run goes on in the right epoch.
    """

    def __init__(self, plan: Plan, *, rank: int, epoch: Callable[[], int]) -> None:
        self.plan, self.rank, self.epoch = plan, rank, epoch

    def __len__(self) -> int:
        return self.plan.micro_steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        plan = self.plan
        first = self.epoch() * plan.windows_per_epoch
        for number in range(first, first + plan.windows_per_epoch):
            rows = plan.window(number, rank=self.rank)
            for _ in range(plan.micro_steps_per_window * plan.num_iterations):
                yield rows
