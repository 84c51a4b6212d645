"""What is checked before and at the first step, so that a run cannot go wrong quietly."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rl_trainers.online.window import MicroBatch

# Mean difference of log-probs over the first micro-batch. In float32 the two passes differ by
# rounding alone; under bf16 autocast the order of sums moves a log-prob by about 1e-2.
FLOAT32_TOLERANCE = 1e-3
HALF_TOLERANCE = 5e-2


def check_rows(dataset: Any | None, name: str) -> None:
    """Refuse a dataset that holds no prompts.

    Raises:
        ValueError: no rows, or no ``prompt`` column; the message lists the columns.
    """
    if dataset is None:
        return
    if len(dataset) == 0:
        raise ValueError(f"{name} has no rows: pass at least one prompt")
    columns = list(dataset[0])
    if "prompt" not in columns:
        raise ValueError(
            f"{name} has no column 'prompt', only {columns}: rename the column that holds the "
            "prompt (text, or a list of messages), for example dataset.rename_column(...)"
        )


def compare_with_engine(logps: Tensor, micro_batch: MicroBatch, *, half: bool) -> None:
    """Stop the run if engine and trainer disagree about samples that the engine just drew.

    Args:
        logps: ``[N, T]`` of the trainer.
        micro_batch: holds the engine's.
        half: whether the passes run in half precision.

    Raises:
        RuntimeError: they disagree by more than rounding; the likely causes are named.
    """
    mask = micro_batch.mask
    if not mask.any():
        return
    difference = float((logps - micro_batch.engine_logps)[mask].abs().mean())
    allowed = HALF_TOLERANCE if half else FLOAT32_TOLERANCE
    if difference > allowed:
        raise RuntimeError(
            f"the engine's and the trainer's log-probs of the same tokens "
            f"differ by {difference:.3g} on average (rounding explains {allowed:g}): the engine "
            "samples from another policy than the one being trained. Likely causes: another "
            "temperature, other weights or dtype, dropout, or positions of padded prompts"
        )
