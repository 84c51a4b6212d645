"""GRPO: its gradient against a naive one, for every split, and what it does with odd groups."""

import copy
import json
import math
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from closeness import assert_close
from rl_models import BaseReference
from rl_trainers import GRPOConfig, GRPOTrainer
from rl_trainers.online.window import split_evenly

# Four completions a prompt, of unequal lengths; id 2 is the stop token.
SCRIPT = [[20, 21, 2], [22, 2], [23, 24, 25, 26, 27], [2]]
REWARDS = [1.0, 0.0, 0.5, 0.25]


def rewards_in_turn(completions, **kwargs):
    return [REWARDS[i % 4] for i in range(len(completions))]


def alternate(place, **kwargs):
    """The groups of odd prompts all get the same reward."""
    return [REWARDS[i % 4] if p % 2 == 0 else 0.5 for i, p in enumerate(place)]


@pytest.fixture
def trainer_of(scripted_engine):
    def build(model, tokenizer, prompts, settings, reward=rewards_in_turn, **changes):
        engine = changes.pop("engine", None) or scripted_engine(model, SCRIPT)
        return _trainer(model, tokenizer, prompts, settings, reward, engine, changes)

    return build


def _trainer(model, tokenizer, prompts, settings, reward, engine, changes):
    peft_config = changes.pop("peft_config", None)
    config = GRPOConfig(
        **{
            **settings,
            "optim": "sgd",
            "num_generations": 4,
            "max_completion_length": 5,
            "per_device_train_batch_size": 6,
            "shuffle_dataset": False,
            **changes,
        }
    )
    return GRPOTrainer(
        model,
        config,
        train_dataset=prompts,
        reward_funcs=reward,
        processing_class=tokenizer,
        engine=engine,
        peft_config=peft_config,
    )


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


@pytest.fixture
def naive_gradient(naive_logps):
    return partial(_naive_gradient, naive_logps)


def _naive_gradient(
    naive_logps, model, tokenizer, prompts, loss_type, *, beta=0.0, reference=None, reward=None
):
    """Of the loss as the papers write it, row by row in float64."""
    model = copy.deepcopy(model).double()
    sequences, tokens = [], []
    for p, row in enumerate(prompts):
        prompt = tokenizer(row["prompt"])["input_ids"]
        scores = torch.tensor(REWARDS, dtype=torch.float64)
        if reward is alternate and p % 2:
            scores = torch.full((4,), 0.5, dtype=torch.float64)
        if loss_type == "dr_grpo":
            advantages = scores - scores.mean()
        else:
            advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
        for advantage, ids in zip(advantages, SCRIPT, strict=True):
            logps = naive_logps(model, prompt, ids)
            values = -torch.exp(logps - logps.detach()) * advantage
            if beta:
                with torch.no_grad():
                    ref = naive_logps(reference.double(), prompt, ids)
                d = ref - logps
                values = values + beta * (d.exp() - d - 1)
            sequences.append(values)
            tokens.append(len(ids))
    if loss_type == "grpo":
        loss = torch.stack([s.mean() for s in sequences]).mean()
    elif loss_type == "dr_grpo":
        loss = torch.stack([s.sum() for s in sequences]).sum() / (len(sequences) * 5)
    else:
        loss = torch.cat(sequences).sum() / sum(tokens)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize(("batch", "accumulation"), [(6, 1), (3, 2), (1, 6), (2, 3)])
def test_a_step_follows_the_naive_gradient_for_every_split(
    model, tokenizer, prompts, settings, loss_type, batch, accumulation, trainer_of, naive_gradient
):
    """A4, E6: one gradient whatever the micro-batches; half the groups have no signal."""
    scale = "none" if loss_type == "dr_grpo" else "group"
    loss, gradient = naive_gradient(model, tokenizer, prompts, loss_type, reward=alternate)
    before = weights(model)
    trainer = trainer_of(
        model,
        tokenizer,
        prompts,
        settings,
        alternate,
        loss_type=loss_type,
        scale_rewards=scale,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
    )
    trainer.train()
    moved = (before - weights(model)) / settings["learning_rate"]
    assert_close(moved, gradient, rtol=1e-3, atol=1e-5)
    assert_close(trainer.state.log_history[0]["loss"], loss, atol=1e-6)
    assert_close(trainer.state.log_history[0]["groups_without_signal"], 0.5)


def test_the_kl_term_reaches_groups_without_signal(
    model, tokenizer, prompts, settings, trainer_of, naive_gradient
):
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for i, parameter in enumerate(reference.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=_generator(i)))
    settings["max_steps"] = 1
    loss, gradient = naive_gradient(
        model,
        tokenizer,
        prompts,
        "dapo",
        beta=0.3,
        reference=copy.deepcopy(reference),
        reward=alternate,
    )
    before = weights(model)
    config = {"beta": 0.3, "loss_type": "dapo"}
    trainer = trainer_of(model, tokenizer, prompts, settings, alternate, **config)
    trainer.reference = BaseReference(reference)
    trainer.train()
    moved = (before - weights(model)) / settings["learning_rate"]
    assert_close(moved, gradient, rtol=1e-3, atol=1e-5)
    assert_close(trainer.state.log_history[0]["loss"], loss, atol=1e-5)


def _generator(seed):
    return torch.Generator().manual_seed(seed)


def test_step_zero_has_no_kl(model, tokenizer, prompts, settings, trainer_of):
    """F8: the reference is made of the weights that were passed in."""
    with torch.no_grad():
        model.lm_head.weight.add_(0.1)
    trainer = trainer_of(model, tokenizer, prompts, settings, beta=0.1)
    trainer.train()
    assert_close(trainer.state.log_history[0]["kl"], 0.0, atol=1e-9)


def test_a_step_without_signal_moves_the_momentum_like_a_zero_gradient(
    model, tokenizer, prompts, settings, trainer_of, scripted_engine
):
    """Skipping the model must not skip what the optimiser does with a gradient of zeros."""

    def first_step_only(completions, trainer_state, **kwargs):
        return REWARDS[:4] * 6 if trainer_state.global_step == 0 else [0.5] * len(completions)

    results = []
    for skip in (True, False):
        twin = copy.deepcopy(model)
        trainer = trainer_of(
            twin,
            tokenizer,
            prompts,
            {**settings, "max_steps": 3},
            first_step_only,
            engine=scripted_engine(twin, SCRIPT),
            optim="adamw_torch",
        )
        if not skip:
            trainer.needs_every_group = lambda: True
        trainer.train()
        results.append(weights(twin))
    assert not torch.equal(results[0], weights(model))
    assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_completions_that_cannot_be_scored_are_left_out(
    model, tokenizer, prompts, settings, trainer_of
):
    """E2, E12: out of mean and std, advantage 0, counted; a group of one left has no signal."""

    def partly(place, **kwargs):
        table = {0: [1.0, None, 0.0, None], 1: [None] * 4, 2: [None, None, None, 1.0]}
        return [table.get(p, REWARDS)[i % 4] for i, p in enumerate(place)]

    trainer = trainer_of(model, tokenizer, prompts, settings, partly)
    groups = trainer._generate_and_score_completions(list(prompts))
    half = 1 / math.sqrt(2)  # std of (1, 0) with Bessel's correction
    expected = 0.5 / (half + 1e-4)
    assert_close(groups[0].advantages, [expected, 0.0, -expected, 0.0])
    assert groups[0].trained == [True, False, True, False]
    for group in groups[1:3]:
        assert_close(group.advantages, [0.0] * 4)
        assert not group.has_signal
    assert_close(trainer.metrics.drain()["not_scorable"], 9 / 24)


def test_the_logged_reward_is_the_one_that_advantages_used(
    model, tokenizer, prompts, settings, trainer_of
):
    """E5, with weights."""

    def tenth(completions, **kwargs):
        return [0.1] * len(completions)

    trainer = trainer_of(
        model, tokenizer, prompts, settings, [rewards_in_turn, tenth], reward_weights=[2.0, 10.0]
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    assert_close(logged["reward"], 2 * sum(REWARDS) / 4 + 1.0)
    assert_close(logged["rewards/tenth"], 0.1)


def test_truncated_completions_leave_numerator_and_denominator(
    model, tokenizer, prompts, settings, trainer_of
):
    """C9: of lengths 3, 2, 5 (cut) and 1, six tokens a group are counted."""
    trainer = trainer_of(model, tokenizer, prompts, settings, mask_truncated_completions=True)
    trainer._fill_window(list(prompts), 1)
    assert_close(trainer._denominators[0], 6 * 6.0)


def test_a_reused_window_is_generated_once_and_compared_with_the_sampling_policy(
    model, tokenizer, prompts, settings, trainer_of, scripted_engine
):
    engine = scripted_engine(model, SCRIPT)
    trainer = trainer_of(
        model,
        tokenizer,
        prompts,
        {**settings, "max_steps": 4, "learning_rate": 0.1},
        engine=engine,
        num_iterations=2,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=1,
        steps_per_generation=2,
    )
    trainer.train()
    assert engine.calls == 1
    spread = [
        row["policy/ratio_max"] - row["policy/ratio_min"]
        for row in trainer.state.log_history
        if "policy/ratio_max" in row
    ]
    assert_close(spread[0], 0.0, atol=1e-5)
    assert min(spread[1:]) > 1e-3


def test_an_engine_with_another_policy_stops_the_run(
    model, tokenizer, prompts, settings, trainer_of, scripted_engine
):
    """A2, contract 12: an engine at temperature 0.6, a trainer at 1."""
    engine = scripted_engine(model, SCRIPT, temperature=0.6)
    trainer = trainer_of(model, tokenizer, prompts, settings, engine=engine)
    with pytest.raises(RuntimeError, match="log-probs of the same tokens differ"):
        trainer.train()


def test_the_first_update_has_ratio_one(model, tokenizer, prompts, settings, trainer_of):
    """A11, with the engine of the trainer itself at another temperature than 1."""
    config = {"temperature": 0.7, "per_device_train_batch_size": 2}
    trainer = trainer_of(model, tokenizer, prompts, settings, engine=None, **config)
    trainer.engine = trainer._own_engine()
    trainer.train()
    logged = trainer.state.log_history[0]
    assert_close([logged["policy/ratio_min"], logged["policy/ratio_max"]], [1.0, 1.0])


def test_a_gradient_that_is_not_finite_is_not_applied(
    model, tokenizer, prompts, settings, trainer_of
):
    """E10: the run stops and names the parameter; the last good weights stand."""
    trainer = trainer_of(model, tokenizer, prompts, settings)
    model.lm_head.weight.register_hook(lambda g: g * math.inf)
    before = weights(model)
    with pytest.raises(FloatingPointError, match=r"gradient of .* is not finite at step 1"):
        trainer.train()
    assert torch.equal(weights(model), before)


def test_the_run_folder_holds_model_metrics_completions_and_picture(
    model, tokenizer, prompts, settings, trainer_of
):
    def noted(completions, log_extra, log_metric, **kwargs):
        log_extra("half", [i / 2 for i in range(len(completions))])
        log_metric("seen", len(completions))
        return rewards_in_turn(completions)

    trainer = trainer_of(model, tokenizer, prompts, {**settings, "max_steps": 2}, noted)
    trainer.train()
    trainer.save_model()
    folder = Path(settings["output_dir"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[:2]] == [1, 2]
    assert lines[0]["seen"] == 24
    assert (folder / "reward_curve.png").read_bytes()[:4] == b"\x89PNG"
    table = pq.read_table(folder / "completions" / "step-000002.parquet").to_pydict()
    assert table["completion_ids"][:4] == SCRIPT
    assert table["finish_reason"][:4] == ["stop", "stop", "length", "stop"]
    assert_close(table["reward"][:4], REWARDS)
    assert table["half"][3] == 1.5
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(weights(plain), weights(model))
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()


def test_every_stop_id_is_saved_with_the_model(model, tokenizer, prompts, settings, trainer_of):
    """C7: the generation config's and the template's end of turn."""
    model.generation_config.eos_token_id = [50]
    trainer = trainer_of(model, tokenizer, prompts, settings)
    assert set(trainer.stop_ids) == {2, 50}
    trainer.save_model()
    saved = AutoModelForCausalLM.from_pretrained(settings["output_dir"])
    assert set(saved.generation_config.eos_token_id) == {2, 50}


def test_evaluation_of_five_prompts_with_one_generation(
    model, tokenizer, prompts, settings, trainer_of
):
    """E6; training metrics are not mixed with it."""

    def position(place, **kwargs):
        return [float(p) for p in place]

    trainer = trainer_of(
        model, tokenizer, prompts, settings, position, per_device_eval_batch_size=2
    )
    trainer.metrics.add("reward", 7.0)
    results = trainer.evaluate(prompts.select(range(5)))
    assert_close(results["eval_reward"], 2.0)
    assert trainer.metrics.drain() == {"reward": 7.0}


def test_conversations_are_rendered_and_their_completions_are_messages(
    model, tokenizer, settings, trainer_of
):
    from datasets import Dataset

    seen = {}

    def look(prompts, completions, answers, finish_reasons, **kwargs):
        seen.update(prompt=prompts[0], completion=completions[0], answer=answers[0])
        return [0.0, 1.0] * (len(completions) // 2)

    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "hi"}]}])
    trainer = trainer_of(model, tokenizer, rows, settings, look, per_device_train_batch_size=1)
    trainer.train()
    assert seen["prompt"] == [{"role": "user", "content": "hi"}]
    assert seen["completion"] == [{"role": "assistant", "content": tokenizer.decode([20, 21])}]
    assert seen["answer"] == tokenizer.decode([20, 21])


def test_bad_settings_are_refused_when_the_config_is_built(tmp_path):
    for changes, words in [
        ({"num_generations": 1}, "at least 2"),
        ({"loss_type": "gpro"}, "choose one of"),
        ({"scale_rewards": "all"}, "'group', 'batch' or 'none'"),
        ({"beta": -0.1}, "beta=-0.1"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 6}, "no multiple"),
        ({"remove_unused_columns": True}, "has no effect"),
        ({"label_smoothing_factor": 0.1}, "has no effect"),
        ({"use_liger_kernel": True}, "has no effect"),
    ]:
        with pytest.raises(ValueError, match=words):
            GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **changes)
    with pytest.raises(TypeError, match="num_generation"):
        GRPOConfig(output_dir=str(tmp_path), num_generation=4)


def test_bad_arguments_are_refused_before_anything_runs(
    model, tokenizer, prompts, settings, trainer_of
):
    def build(**changes):
        return trainer_of(model, tokenizer, changes.pop("rows", prompts), settings, **changes)

    with pytest.raises(ValueError, match="no column 'prompt', only \\['question', 'place'\\]"):
        build(rows=prompts.rename_column("prompt", "question"))
    with pytest.raises(ValueError, match="no rows"):
        build(rows=prompts.select([]))
    with pytest.raises(TypeError, match="cannot be called"):
        build(reward=["exact"])
    with pytest.raises(ValueError, match="given twice"):
        build(reward_functions=["math:sqrt"])
    with pytest.raises(ValueError, match="no effect while beta=0"):
        GRPOTrainer(
            model,
            GRPOConfig(**settings),
            train_dataset=prompts,
            reward_funcs=rewards_in_turn,
            processing_class=tokenizer,
            ref_model=model,
        )


def test_groups_are_split_evenly():
    assert [len(part) for part in split_evenly(list("abcdefg"), 3)] == [3, 2, 2]
    assert split_evenly([], 2) == [[], []]


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_adapter_trains_alone(model, tokenizer, prompts, settings, trainer_of, beta):
    """E7, F3: the base stays bit-equal, the reference is the adapter as it started."""
    from peft import LoraConfig

    before = {name: p.clone() for name, p in model.named_parameters()}
    trainer = trainer_of(
        model,
        tokenizer,
        prompts,
        {**settings, "max_steps": 2, "bf16": True},
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
        beta=beta,
        optim="adamw_torch",
    )
    trainer.engine = trainer._own_engine()
    trainer.train()
    base = trainer.model.get_base_model()
    for name, parameter in base.named_parameters():
        if "lora" in name:
            assert parameter.abs().sum() > 0
        else:
            assert torch.equal(parameter, before[name.replace(".base_layer", "")])
    if beta:
        assert_close(trainer.state.log_history[0]["kl"], 0.0, atol=1e-9)
        assert trainer.state.log_history[1]["kl"] > 0
