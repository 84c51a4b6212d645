"""A run that is stopped and resumed ends where an unbroken one ends, bit for bit."""

import copy

import pytest
import torch
from datasets import Dataset

from rl_trainers import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer


def length_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


def grpo(model, tokenizer, settings, **changes):
    rows = Dataset.from_list([{"prompt": f"prompt {i}"} for i in range(10)])
    config = GRPOConfig(
        **{
            **settings,
            "num_generations": 3,
            "max_completion_length": 4,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            **changes,
        }
    )
    return GRPOTrainer(
        model, config, train_dataset=rows, reward_funcs=length_reward, processing_class=tokenizer
    )


def sft(model, tokenizer, settings, **changes):
    rows = Dataset.from_list([{"text": f"text number {i}"} for i in range(10)])
    config = SFTConfig(**{**settings, "per_device_train_batch_size": 2, **changes})
    return SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("build", "changes"),
    [
        (sft, {}),
        (sft, {"gradient_accumulation_steps": 2}),
        (grpo, {}),
        (grpo, {"num_iterations": 2}),
    ],
)
def test_six_steps_are_four_steps_and_two_more(model, tokenizer, settings, build, changes):
    """G3, at a window's end: weights, order of data, samples and logs; across an epoch's end."""
    settings = {
        **settings,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        **changes,
    }
    unbroken = build(copy.deepcopy(model), tokenizer, settings)
    unbroken.train()
    resumed = build(copy.deepcopy(model), tokenizer, settings)
    resumed.train(resume_from_checkpoint=f"{settings['output_dir']}/checkpoint-4")
    assert torch.equal(weights(resumed.model), weights(unbroken.model))
    assert not torch.equal(weights(resumed.model), weights(model))
    kept = [[row.get("loss") for row in t.state.log_history[:6]] for t in (unbroken, resumed)]
    assert kept[0] == kept[1]


def test_resuming_inside_a_reused_window_says_what_it_means(model, tokenizer, settings):
    settings = {**settings, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    grpo(copy.deepcopy(model), tokenizer, settings, num_iterations=2).train()
    resumed = grpo(copy.deepcopy(model), tokenizer, settings, num_iterations=2)
    with pytest.warns(UserWarning, match="resumed inside a window"):
        resumed.train(resume_from_checkpoint=f"{settings['output_dir']}/checkpoint-3")
