"""``rl-train grpo``."""

from __future__ import annotations

from collections.abc import Sequence

from rl_trainers.cli.options import load_rows, parse
from rl_trainers.grpo import GRPOConfig, GRPOTrainer


def run(arguments: Sequence[str]) -> None:
    """Train, and save the model into the run folder."""
    options, config = parse("grpo", GRPOConfig, arguments)
    rows, eval_rows = load_rows(options)
    trainer = GRPOTrainer(options.model, config, train_dataset=rows, eval_dataset=eval_rows)
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model()
