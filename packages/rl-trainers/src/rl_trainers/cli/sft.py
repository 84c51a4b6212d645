"""``rl-train sft``."""

from __future__ import annotations

from collections.abc import Sequence

from rl_trainers.cli.options import load_rows, parse
from rl_trainers.sft import SFTConfig, SFTTrainer


def run(arguments: Sequence[str]) -> None:
    """Train, and save the model into the run folder."""
    options, config = parse("sft", SFTConfig, arguments)
    rows, eval_rows = load_rows(options)
    trainer = SFTTrainer(options.model, config, train_dataset=rows, eval_dataset=eval_rows)
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model()
