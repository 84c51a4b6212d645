"""What the online trainers share: sampling, sizes in prompts, rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rl_trainers.core.config import BaseConfig, as_mapping
from rl_trainers.rollouts import SamplingParams


@dataclass
class OnlineConfig(BaseConfig):
    """Settings of trainers that sample completions while they train.

    Sizes are given in prompts: an optimiser step takes
    ``per_device_train_batch_size * gradient_accumulation_steps * ranks`` prompts, each with
    ``num_generations`` completions.

    Raises:
        ValueError: a size or a sampling setting outside its range.
    """

    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate."})
    logging_steps: float = field(default=1, metadata={"help": "A log line every so many steps."})
    num_generations: int = field(default=8, metadata={"help": "Completions of each prompt."})
    max_completion_length: int = field(
        default=512, metadata={"help": "Most tokens of a completion, its stop token included."}
    )
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus sampling; 1 admits all tokens."})
    top_k: int = field(default=0, metadata={"help": "Draw from the k likeliest; 0 admits all."})
    min_p: float = field(default=0.0, metadata={"help": "Least share of the likeliest token."})
    steps_per_generation: int | None = field(
        default=None,
        metadata={
            "help": "Micro-steps generated at once: a multiple of gradient_accumulation_steps, "
            "which is the default (one generation an optimiser step)."
        },
    )
    num_iterations: int = field(
        default=1, metadata={"help": "How often each generated window is trained on."}
    )
    shuffle_dataset: bool = field(default=True, metadata={"help": "Shuffle prompts each epoch."})
    reward_functions: list[str] | None = field(
        default=None, metadata={"help": "Reward functions as module:name or file.py:name."}
    )
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "One factor a reward function; all 1 by default."}
    )
    reward_timeout: float | None = field(
        default=300.0, metadata={"help": "Seconds a reward function may take for one window."}
    )
    mask_truncated_completions: bool = field(
        default=False,
        metadata={"help": "Leave completions cut at the limit out of the loss and its count."},
    )
    eval_num_generations: int = field(
        default=1, metadata={"help": "Completions of each prompt in evaluation."}
    )
    eval_temperature: float = field(
        default=0.0, metadata={"help": "Sampling temperature in evaluation; 0 is greedy."}
    )
    log_completions: bool = field(
        default=True, metadata={"help": "Write completions/step-*.parquet into the run folder."}
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further variables for the chat template, as a mapping."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chat_template_kwargs = as_mapping("chat_template_kwargs", self.chat_template_kwargs)
        for name in ("num_generations", "num_iterations", "eval_num_generations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.temperature <= 0:
            raise ValueError(
                f"temperature={self.temperature}: must be above 0, since a group of equal "
                "completions has no advantages"
            )
        if self.steps_per_generation is None:
            self.steps_per_generation = self.gradient_accumulation_steps
        if self.steps_per_generation % self.gradient_accumulation_steps:
            raise ValueError(
                f"steps_per_generation={self.steps_per_generation} is no multiple of "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}: an optimiser "
                "step must lie inside one generated window"
            )
        self.sampling()

    def sampling(self) -> SamplingParams:
        """How training completions are drawn."""
        return SamplingParams(
            max_new_tokens=self.max_completion_length,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )

    def eval_sampling(self) -> SamplingParams:
        """How evaluation completions are drawn: no truncation, ``eval_temperature``."""
        return SamplingParams(
            max_new_tokens=self.max_completion_length, temperature=self.eval_temperature
        )
