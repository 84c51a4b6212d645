from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from closeness import assert_close
from rl_models import (
    BaseReference,
    CachedReference,
    CompletionBatch,
    StartingReference,
    adapters_off,
    check_not_shared,
    create_reference_model,
    disable_dropout,
    move_towards,
    score_tokens,
    weights_hash,
)
from rl_models.testing import tiny_model

BATCH = CompletionBatch.from_ids([[5, 6, 7], [8]], [[9, 10], [11], [12, 13, 14]], [0, 1, 1])


def with_adapter(model, *, zero=True, **config):
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], **config))
    if not zero:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.3)
    return model


def take_a_step(model):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    score_tokens(model, BATCH).logps.sum().neg().backward()
    optimizer.step()


def test_f8_the_reference_has_the_weights_that_were_passed_in():
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.config._name_or_path = "some/other-model"
    reference = create_reference_model(model)
    before = score_tokens(model, BATCH).logps
    assert torch.equal(score_tokens(reference, BATCH).logps, before)
    take_a_step(model)
    assert torch.equal(score_tokens(reference, BATCH).logps, before)
    assert not any(p.requires_grad for p in reference.parameters())


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "gpt_neox"])
def test_f6_with_dropout_in_the_model_the_margin_at_step_0_is_0(architecture):
    dropout = {
        "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
        "opt": {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5},
        "gpt_neox": {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    }.get(architecture, {"attention_dropout": 0.5})
    policy = tiny_model(architecture, **dropout).train()
    reference = create_reference_model(policy).train()
    noisy = score_tokens(policy, BATCH).logps
    assert not torch.allclose(noisy, score_tokens(policy, BATCH).logps)
    disable_dropout(policy)
    margin = score_tokens(policy, BATCH).logps - score_tokens(reference, BATCH).logps
    assert not bool(margin.any())


def test_shared_lower_layers_are_one_and_frozen_in_both():
    policy = tiny_model("llama", num_hidden_layers=3, tie_word_embeddings=False)
    reference = create_reference_model(policy, num_shared_layers=2)
    mine, other = dict(policy.named_parameters()), dict(reference.named_parameters())
    shared = {name for name in mine if mine[name] is other[name]}
    lower = {n for n in mine if ".layers.0." in n or ".layers.1." in n}
    assert shared == lower | {"model.embed_tokens.weight"}
    assert {n for n in mine if not mine[n].requires_grad} == shared
    check_not_shared(policy, reference)
    before = score_tokens(reference, BATCH).logps
    take_a_step(policy)
    assert torch.equal(score_tokens(reference, BATCH).logps, before)
    assert not torch.equal(score_tokens(policy, BATCH).logps, before)


def test_a_tied_embedding_is_not_shared_since_the_head_must_train():
    policy = tiny_model("llama", tie_word_embeddings=True)
    create_reference_model(policy, num_shared_layers=1)
    assert policy.lm_head.weight.requires_grad


def test_more_shared_layers_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="num_shared_layers=5, but no weight's name"):
        create_reference_model(tiny_model("llama"), num_shared_layers=5)
    with pytest.raises(ValueError, match="no weight's name holds 'blocks\\.0'"):
        create_reference_model(tiny_model("llama"), 1, "blocks.{layer}")


def test_f2_a_trained_weight_in_both_policy_and_reference_is_named():
    policy = tiny_model("llama")
    shallow = copy.copy(policy)
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight is the policy's"):
        check_not_shared(policy, shallow)
    check_not_shared(policy, create_reference_model(policy))


def test_f3_a_run_that_continues_an_adapter_starts_with_a_margin_of_0():
    policy = with_adapter(tiny_model("llama"), zero=False)
    start = score_tokens(policy, BATCH).logps.detach()
    reference = StartingReference(policy)
    assert torch.equal(reference.score(BATCH), start)
    take_a_step(policy)
    assert not torch.equal(score_tokens(policy, BATCH).logps, start)
    assert torch.equal(reference.score(BATCH), start)
    base = BaseReference(policy).score(BATCH)
    assert not torch.allclose(base, start)


def test_the_policys_gradient_is_the_same_with_the_reference_scored_between():
    policy = with_adapter(tiny_model("llama"), zero=False)
    reference = StartingReference(policy)
    take_a_step(policy)
    policy.zero_grad()
    score_tokens(policy, BATCH).logps.sum().backward()
    wanted = [p.grad.clone() for p in policy.parameters() if p.requires_grad]
    policy.zero_grad()
    logps = score_tokens(policy, BATCH).logps
    reference.score(BATCH)
    BaseReference(policy).score(BATCH)
    logps.sum().backward()
    found = [p.grad for p in policy.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_the_base_reference_is_the_model_before_the_adapter():
    base = tiny_model("llama")
    wanted = score_tokens(base, BATCH).logps.detach()
    policy = with_adapter(base, zero=False, lora_dropout=0.5).train()
    assert_close(BaseReference(policy).score(BATCH), wanted)
    with adapters_off(policy):
        assert_close(score_tokens(policy, BATCH).logps, wanted)
    assert policy.training


def test_f9_a_moving_reference_follows_an_adapter_and_a_full_model():
    policies = [tiny_model("llama"), tiny_model("llama", tie_word_embeddings=True)]
    for policy in (with_adapter(tiny_model("llama"), zero=False), *policies):
        reference = StartingReference(policy)
        start = {n: w.clone() for n, w in reference.weights.items()}
        take_a_step(policy)
        trained = {f"model.{n}": p for n, p in policy.named_parameters() if p.requires_grad}
        reference.sync(0.25)
        for name, weight in reference.weights.items():
            assert_close(weight, 0.75 * start[name] + 0.25 * trained[name])
        reference.sync(1.0)
        assert_close(reference.score(BATCH), score_tokens(policy, BATCH).logps)


def test_a_frozen_copy_moves_towards_the_policy():
    policy = tiny_model("llama")
    reference = create_reference_model(policy)
    start = reference.lm_head.weight.clone()
    take_a_step(policy)
    move_towards(reference, policy, 0.6)
    assert_close(reference.lm_head.weight, 0.4 * start + 0.6 * policy.lm_head.weight)
    with pytest.raises(ValueError, match="mixup="):
        move_towards(reference, policy, 1.5)
    with pytest.raises(ValueError, match="same weights"):
        move_towards(reference, tiny_model("gpt2"), 0.5)


def test_a_copy_of_a_model_with_adapters_is_refused_with_what_to_use():
    with pytest.raises(ValueError, match="StartingReference"):
        create_reference_model(with_adapter(tiny_model("llama")))


class Counting:
    def __init__(self, model):
        self.reference, self.rows = BaseReference(model), 0

    def score(self, batch, *, temperature=1.0):
        self.rows += len(batch.completion_lengths)
        return self.reference.score(batch, temperature=temperature)


def test_f7_kept_log_probs_are_found_by_content_and_checked_once_against_live_ones(tmp_path):
    model = tiny_model("llama")
    file = tmp_path / "cache" / "ref.sqlite"
    first = Counting(model)
    with CachedReference(first, file, model=model) as cached:
        wanted = cached.score(BATCH)
    assert first.rows == 3
    assert_close(wanted, score_tokens(model, BATCH).logps)
    other = copy.deepcopy(model)
    again = Counting(other)
    shuffled = CompletionBatch.from_ids(
        [[8], [5, 6, 7]], [[12, 13, 14], [9, 10], [21]], [0, 1, 0], pad_token_id=3
    )
    with CachedReference(again, file, model=other) as cached:
        found = cached.score(shuffled)
        assert again.rows == 3  # two rows checked against live ones, one new
        assert_close(found[:2], wanted[[2, 0]])
        cached.score(BATCH)
        assert again.rows == 3
        cached.score(BATCH, temperature=0.7)
        assert again.rows == 6


def test_f7_log_probs_kept_for_another_model_are_not_found_or_refused(tmp_path):
    model = tiny_model("llama")
    file = tmp_path / "ref.sqlite"
    with CachedReference(BaseReference(model), file, model=model) as cached:
        cached.score(BATCH)
    other = tiny_model("llama", seed=1)
    assert weights_hash(other) != weights_hash(model)
    with CachedReference(BaseReference(other), file, model=other) as fresh:
        assert_close(fresh.score(BATCH), score_tokens(other, BATCH).logps)
    with (
        CachedReference(BaseReference(other), file, model=model) as wrong,
        pytest.raises(ValueError, match="kept reference log-probs differ from live ones"),
    ):
        wrong.score(BATCH)


def test_the_hash_of_weights_sees_one_changed_number():
    model = tiny_model("llama")
    before = weights_hash(model)
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    assert weights_hash(model) != before
