"""Group Relative Policy Optimization.

Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), with the loss averages of DAPO
(arXiv 2503.14476), Dr. GRPO (arXiv 2503.20783) and BNPO (arXiv 2506.02864).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from rl_models import BaseReference, StartingReference, create_reference_model
from rl_ops import group_advantages, kl_estimate, losses
from rl_ops.losses.reduce import loss_denominator, reduce_loss
from rl_trainers.online.config import OnlineConfig
from rl_trainers.online.trainer import OnlineTrainer
from rl_trainers.online.window import MicroBatch

# loss_type -> the formula and how its values are averaged over an optimiser step.
LOSSES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "grpo": (losses.grpo, "sequence_mean"),
    "bnpo": (losses.bnpo, "token_mean"),
    "dapo": (losses.dapo, "token_mean"),
    "dr_grpo": (losses.dr_grpo, "constant"),
}


@dataclass
class GRPOConfig(OnlineConfig):
    """Settings of :class:`GRPOTrainer`; sizes are in prompts (see :class:`OnlineConfig`).

    Raises:
        ValueError: an unknown loss type, fewer than two generations, or a negative ``beta``.
    """

    beta: float = field(
        default=0.0, metadata={"help": "Weight of the KL term to the reference; 0: no reference."}
    )
    epsilon: float = field(
        default=0.2, metadata={"help": "The ratio is clipped below 1 - epsilon."}
    )
    epsilon_high: float | None = field(
        default=None, metadata={"help": "... and above 1 + epsilon_high; epsilon by default."}
    )
    delta: float | None = field(
        default=None, metadata={"help": "Upper bound of the ratio for negative advantages too."}
    )
    scale_rewards: Literal["group", "batch", "none"] = field(
        default="group", metadata={"help": "The standard deviation that divides advantages."}
    )
    loss_type: Literal["grpo", "bnpo", "dapo", "dr_grpo"] = field(
        default="dapo", metadata={"help": "The loss formula and its average."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type not in LOSSES:
            raise ValueError(f"loss_type={self.loss_type!r}: choose one of {sorted(LOSSES)}")
        if self.scale_rewards not in ("group", "batch", "none"):
            raise ValueError(
                f"scale_rewards={self.scale_rewards!r}: choose 'group', 'batch' or 'none'"
            )
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations={self.num_generations}: GRPO compares the completions of a "
                "prompt, so it needs at least 2"
            )
        if self.beta < 0:
            raise ValueError(f"beta={self.beta}: must be at least 0")


class GRPOTrainer(OnlineTrainer):
    """GRPO: each completion's advantage is its reward against the mean of its group.

    Takes the arguments of :class:`OnlineTrainer`, and ``ref_model`` where ``beta`` is above 0. By
    default the reference is the policy as it starts: a frozen copy, or the starting adapter.

    Example:
        >>> def reward_short(completions, **kwargs):
        ...     return [-float(len(text)) for text in completions]
        >>> trainer = GRPOTrainer(  # doctest: +SKIP
        ...     "HuggingFaceTB/SmolLM2-135M-Instruct",
        ...     GRPOConfig(output_dir="run"),
        ...     train_dataset=dataset,
        ...     reward_funcs=reward_short,
        ... )
    """

    args: GRPOConfig

    def __init__(
        self,
        model: Any,
        args: GRPOConfig | None = None,
        *,
        ref_model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or GRPOConfig()
        super().__init__(model, args, **kwargs)
        self.reference = self._reference(ref_model) if args.beta else None
        if ref_model is not None and not args.beta:
            raise ValueError("ref_model has no effect while beta=0: set beta, or leave it out")

    def compute_advantages(self, rewards: Tensor) -> Tensor:
        """Rewards less their group's mean, over the chosen standard deviation."""
        return group_advantages(rewards, self.args.num_generations, scale=self.args.scale_rewards)

    def needs_every_group(self) -> bool:
        """The KL term pulls on completions without an advantage too."""
        return self.args.beta != 0

    def denominator_of(self, mask: Tensor) -> Tensor:
        """Tokens, sequences or a constant, as ``loss_type`` averages."""
        mode = LOSSES[self.args.loss_type][1]
        longest = self.args.max_completion_length if mode == "constant" else None
        return loss_denominator(mask, mode=mode, max_length=longest)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """The clipped surrogate, plus ``beta`` times the KL estimate to the reference."""
        args = self.args
        batch: MicroBatch = inputs["micro_batch"]
        mask = batch.mask
        formula, mode = LOSSES[args.loss_type]
        logps = self.score_policy(model, batch)
        old_logps = logps.detach() if batch.old_logps is None else batch.old_logps
        clip: dict[str, Any] = {"epsilon": args.epsilon, "epsilon_high": args.epsilon_high}
        values = formula(logps, old_logps, batch.advantages, mask, delta=args.delta, **clip)
        if self.reference is not None:
            ref_logps = self.reference.score(batch.batch, temperature=args.temperature)
            kl = kl_estimate(logps, ref_logps, kind="k3", mask=mask)
            values = values + args.beta * kl
            self.metrics.add("kl", kl.detach().sum(), mask.sum())
        seen = losses.policy_diagnostics(logps, old_logps, mask, **clip)
        for name, value in seen._asdict().items():
            self.metrics.add(f"policy/{name}", value * mask.sum(), mask.sum())
        if num_items_in_batch is None:
            num_items_in_batch = self.denominator_of(mask)
        loss = reduce_loss(values, mask, mode=mode, denominator=num_items_in_batch)
        loss = loss * self.rank_factor
        return (loss, logps) if return_outputs else loss

    def _reference(self, ref_model: nn.Module | None) -> BaseReference | StartingReference:
        if ref_model is not None:
            return BaseReference(ref_model)
        if hasattr(self.model, "peft_config"):
            return StartingReference(self.model)
        return BaseReference(create_reference_model(self.model))
