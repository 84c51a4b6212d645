"""SFT: its loss and gradient against a naive one, for every split and packing."""

import copy

import pytest
import torch
from datasets import Dataset

from closeness import assert_close
from rl_trainers import SFTConfig, SFTTrainer

TEXTS = ["a cat", "on the mat sat", "xy", "one two three four", "zz top", "end of it"]


@pytest.fixture
def rows():
    return Dataset.from_list([{"text": text} for text in TEXTS])


def trainer_of(model, tokenizer, rows, settings, **changes):
    config = SFTConfig(
        **{
            **settings,
            "optim": "sgd",
            "per_device_train_batch_size": 6,
            "train_sampling_strategy": "sequential",
            "max_length": 64,
            **changes,
        }
    )
    return SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer)


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def naive(model, rows_of_ids, masks, *, dft=False):
    """Mean over all trained tokens, row by row in float64."""
    model = copy.deepcopy(model).double()
    losses = []
    for ids, mask in zip(rows_of_ids, masks, strict=True):
        logps = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for t in range(1, len(ids)):
            if mask[t]:
                logp = logps[t - 1, ids[t]]
                losses.append(-logp * logp.detach().exp() if dft else -logp)
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize(("batch", "accumulation"), [(6, 1), (2, 3), (1, 6), (4, 2)])
def test_a_step_is_the_mean_over_all_tokens_for_every_split(
    model, tokenizer, rows, settings, loss_type, batch, accumulation
):
    """A4: rows of 2 to 18 tokens, micro-batches of 6, 2, 1 and 4 + 2 rows."""
    before = weights(model)
    untouched = copy.deepcopy(model)
    trainer = trainer_of(
        model,
        tokenizer,
        rows,
        settings,
        loss_type=loss_type,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
    )
    ids = trainer.train_dataset["input_ids"]
    assert sum(len(row) for row in ids) >= sum(len(text) for text in TEXTS)
    loss, gradient = naive(
        untouched, ids, trainer.train_dataset["loss_mask"], dft=loss_type == "dft"
    )
    trainer.train()
    assert_close((before - weights(model)) / 1e-2, gradient, rtol=1e-3, atol=1e-5)
    assert_close(trainer.state.log_history[0]["loss"], loss)


def test_packed_rows_give_the_same_step_as_rows_alone(model, tokenizer, rows, settings):
    """B7 through the trainer: a packed sample sees none of its neighbours."""
    before, results = weights(model), []
    for changes in ({}, {"packing": True, "max_length": 24}):
        twin = copy.deepcopy(model)
        trainer = trainer_of(twin, tokenizer, rows, settings, **changes)
        trainer.train()
        results.append(before - weights(twin))
    assert len(trainer.train_dataset) < len(rows)
    assert_close(results[1], results[0], rtol=1e-3, atol=1e-6)


def test_the_prompt_is_not_trained(model, tokenizer, settings):
    rows = Dataset.from_list([{"prompt": "2 + 2 =", "completion": " 4"}])
    trainer = trainer_of(model, tokenizer, rows, settings)
    (mask,) = trainer.train_dataset["loss_mask"]
    (ids,) = trainer.train_dataset["input_ids"]
    assert mask[:7] == [0] * 7
    assert all(mask[7:])
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]).startswith(" 4")


def test_evaluation_is_exact_for_any_batch_size(model, tokenizer, rows, settings):
    results = []
    for size in (1, 4, 6):
        trainer = trainer_of(model, tokenizer, rows, settings, per_device_eval_batch_size=size)
        results.append(trainer.evaluate(trainer.train_dataset)["eval_loss"])
    loss, _ = naive(model, trainer.train_dataset["input_ids"], trainer.train_dataset["loss_mask"])
    assert_close(results, [loss] * 3)


def test_rows_are_cut_at_the_limit_by_either_name(model, tokenizer, rows, settings):
    trainer = trainer_of(model, tokenizer, rows, settings, max_length=1024, max_seq_length=4)
    assert max(len(ids) for ids in trainer.train_dataset["input_ids"]) == 4
    with pytest.raises(ValueError, match="two names of one limit"):
        SFTConfig(**settings, max_length=8, max_seq_length=4)


def test_an_unknown_loss_is_refused(settings):
    with pytest.raises(ValueError, match="choose one of"):
        SFTConfig(**settings, loss_type="mse")


def test_a_loss_that_is_not_finite_stops_the_run(model, tokenizer, rows, settings):
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    before = weights(model)
    with pytest.raises((FloatingPointError, ValueError), match="nan"):
        trainer_of(model, tokenizer, rows, settings).train()
    assert torch.equal(weights(model).nan_to_num(), before.nan_to_num())


def test_the_dataset_is_looked_through_before_training(model, tokenizer, settings, caplog):
    rows = Dataset.from_list([{"text": "one"}, {"text": "two"}, {"text": ""}])
    trainer_of(model, tokenizer, rows, settings)
    assert "data audit of 3 rows: 1 " in caplog.text
    caplog.clear()
    trainer_of(model, tokenizer, rows, settings, audit_rows=0)
    assert "data audit" not in caplog.text
