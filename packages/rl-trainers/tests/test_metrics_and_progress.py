"""Means that add up, and what the progress line says."""

import json

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from closeness import assert_close
from rl_trainers.core.metrics import Metrics
from rl_trainers.core.progress import ZERO_LOSS_IN_WORDS, ProgressLine, describe
from rl_trainers.core.run_folder import draw_rewards, read_metrics


def test_a_mean_is_over_everything_seen_not_over_means():
    metrics = Metrics()
    metrics.add_values("reward", torch.tensor([1.0, 2.0, float("nan"), 3.0]))
    metrics.add_values("reward", torch.tensor([10.0]))
    metrics.add("empty", 0.0, count=0)
    assert_close(metrics.drain()["reward"], 4.0)
    assert metrics.drain() == {}


def test_ranks_add_sums_and_counts():
    metrics = Metrics()
    metrics.add("reward", 6.0, count=2)
    other_rank = torch.tensor([[0.0], [4.0]], dtype=torch.float64)
    assert_close(metrics.drain(lambda table: table + other_rank)["reward"], 1.0)


def test_the_line_names_what_is_there():
    logs = {"reward": 0.4567, "accuracy": 0.25, "tokens_per_second": 312.4, "loss": -1e-9}
    assert describe(logs) == "reward 0.457, accuracy 25 %, 312 tok/s, loss 0.0000"
    assert describe({"loss": 2.5}) == "loss 2.5000"


@pytest.fixture
def shown(tmp_path, capsys):
    """What the line writes for given logs, off a terminal."""

    def show(*all_logs):
        line, state = ProgressLine(), TrainerState(max_steps=10, is_world_process_zero=True)
        args, control = TrainingArguments(output_dir=str(tmp_path)), TrainerControl()
        line.on_train_begin(args, state, control)
        for logs in all_logs:
            state.global_step += 1
            line.on_log(args, state, control, logs=logs)
        return capsys.readouterr().err

    return show


def test_a_loss_of_zero_is_explained_once(shown):
    """A11: in words, and only where it is right: with rewards."""
    text = shown({"loss": 0.0, "reward": 0.5}, {"loss": 0.0, "reward": 0.6})
    assert text.count(ZERO_LOSS_IN_WORDS) == 1
    assert "step 2/10, reward 0.600" in text
    assert ZERO_LOSS_IN_WORDS not in shown({"loss": 0.0})


def test_no_picture_without_rewards(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.5}) + "\n")
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.5}]
    assert draw_rewards(tmp_path) is None
