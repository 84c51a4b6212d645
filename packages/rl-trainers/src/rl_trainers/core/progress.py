"""The live line under a run: where it is, how it does, and what a surprising number means."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_BAR = "{percentage:3.0f}%|{bar:14}| step {n_fmt}/{total_fmt}{postfix}, {remaining} left"

ZERO_LOSS_IN_WORDS = (
    "A loss of 0 is right here: on fresh samples the ratio of new to old policy is 1 and the "
    "advantages of a group sum to 0, so the value vanishes while its gradient does not. Watch the "
    "reward."
)


class ProgressLine(TrainerCallback):
    """One line with step, reward, accuracy, tokens per second and time left.

    On a terminal the line is redrawn in place; elsewhere a line is written each time the trainer
    logs, so that a log file stays readable.
    """

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._explained = False
        self._started = 0.0
        self._first_step = 0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Start the clock and, on a terminal, the bar."""
        self._started, self._first_step = time.monotonic(), state.global_step
        if state.is_world_process_zero and sys.stderr.isatty():
            self._bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                bar_format=_BAR,
                dynamic_ncols=True,
            )

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Advance the bar."""
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the newest numbers."""
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        if "reward" in logs and abs(logs["loss"]) < 5e-4 and not self._explained:
            self._explained = True
            self._write(ZERO_LOSS_IN_WORDS)
        numbers = describe(logs)
        if self._bar is not None:
            self._bar.set_postfix_str(numbers)
            return
        done = state.global_step - self._first_step
        left = (
            (time.monotonic() - self._started)
            / max(done, 1)
            * (state.max_steps - state.global_step)
        )
        step = f"step {state.global_step}/{state.max_steps}"
        self._write(f"{step}, {numbers}, {tqdm.format_interval(left)} left")

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Leave the last state of the bar on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _write(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)


def describe(logs: dict[str, float]) -> str:
    """The numbers of one log line in words, those that are there.

    Example:
        >>> describe({"loss": 0.0, "reward": 0.45, "accuracy": 0.31, "tokens_per_second": 221.4})
        'reward 0.450, accuracy 31 %, 221 tok/s, loss 0.0000'
    """
    shown = {
        "reward": "reward {:.3f}",
        "accuracy": "accuracy {:.0%}",
        "tokens_per_second": "{:.0f} tok/s",
        "loss": "loss {:.4f}",
    }
    parts = [text.format(logs[name]) for name, text in shown.items() if name in logs]
    return ", ".join(parts).replace("%", " %").replace("-0.0000", "0.0000")
