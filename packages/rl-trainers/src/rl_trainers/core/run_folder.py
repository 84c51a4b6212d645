"""What a run leaves behind: the metrics of each log line, and a picture of the reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

METRICS_FILE = "metrics.jsonl"
REWARD_PICTURE = "reward_curve.png"


class RunFolderCallback(TrainerCallback):
    """Appends each log line to ``metrics.jsonl`` and draws the reward curve at the end.

    A run that resumes goes on with its file; lines of steps that will be run again are dropped
    first, so that each step stands in it once.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Keep the lines up to the step the run starts from."""
        if not state.is_world_process_zero:
            return
        path = Path(str(args.output_dir)) / METRICS_FILE
        kept = [row for row in read_metrics(path) if 0 < row["step"] <= state.global_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Append one line."""
        if not state.is_world_process_zero or logs is None:
            return
        with (Path(str(args.output_dir)) / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Draw the reward curve, where there is a reward and matplotlib."""
        if state.is_world_process_zero:
            draw_rewards(Path(str(args.output_dir)))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, none if there is no file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def draw_rewards(folder: Path) -> Path | None:
    """Draw ``reward_curve.png`` from ``metrics.jsonl``.

    Returns:
        The picture's path; ``None`` where no reward was logged, or matplotlib is not installed
        (``pip install 'rl-trainers[plot]'``).
    """
    rows = [row for row in read_metrics(folder / METRICS_FILE) if "reward" in row]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not rows:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = [row["step"] for row in rows]
    axes.plot(steps, [row["reward"] for row in rows], label="mean reward")
    for name in sorted({key for row in rows for key in row if key.startswith("rewards/")}):
        drawn = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*drawn, strict=True), linewidth=1, alpha=0.6, label=name)
    axes.set(xlabel="optimiser step", ylabel="reward", title="Reward of sampled completions")
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / REWARD_PICTURE
    figure.savefig(path, dpi=120)
    return path
