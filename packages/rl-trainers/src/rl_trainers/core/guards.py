"""Refuses to apply an update made of numbers that are not finite."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class FiniteGradients(TrainerCallback):
    """Stops the run before the optimiser uses a gradient that is NaN or infinite.

    The weights are then those of the last good step.
    """

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Check every gradient.

        Raises:
            FloatingPointError: the first parameter whose gradient is not finite, by name.
        """
        if model is None:
            return
        named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        if not named:
            return
        # A sum is finite only if every term is; one read, and one transfer for all parameters.
        # In float32, a half-precision sum could overflow over finite terms.
        finite = torch.stack([g.sum(dtype=torch.float32).isfinite() for _, g in named])
        if not finite.all():
            place = named[int((~finite).nonzero()[0])][0]
            raise FloatingPointError(
                f"the gradient of {place} is not finite at step {state.global_step + 1}: the step "
                "was not applied and the weights are those of the step before. Lower the learning "
                "rate, or look at the batch's rewards and log-probabilities"
            )
