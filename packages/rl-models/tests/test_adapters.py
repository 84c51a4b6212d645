from __future__ import annotations

import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from scored import COMPLETIONS, PROMPT_INDEX, PROMPTS, gradients, naive_scores, relative_difference

from closeness import assert_close
from rl_models import CompletionBatch, merged_weights, score_tokens
from rl_models.testing import tiny_model

BATCH = CompletionBatch.from_ids(PROMPTS, COMPLETIONS, PROMPT_INDEX)


def with_adapter(model, **config):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied heads, which these tests mean
        model = get_peft_model(
            model, LoraConfig(**{"target_modules": ["q_proj", "v_proj"], **config})
        )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.2)
    return model


CONFIGS = {
    "attention": {},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "dora": {"use_dora": True},
    "saved head": {"modules_to_save": ["lm_head"]},
    "new tokens": {"trainable_token_indices": [3, 21]},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("config", list(CONFIGS.values()), ids=list(CONFIGS))
def test_a_model_with_adapters_scores_and_differentiates_as_its_own_forward(config, tied):
    model = with_adapter(tiny_model("llama", tie_word_embeddings=tied), **config)
    logps = score_tokens(model, BATCH).logps
    mine = torch.cat([row[: len(c)] for row, c in zip(logps, COMPLETIONS, strict=True)])
    assert_close(mine, torch.cat(naive_scores(model)), atol=1e-5)
    naive = gradients(model, sum(x.sum() for x in naive_scores(model)))
    assert relative_difference(gradients(model, logps.sum()), naive) < 1e-5


def test_adapters_switched_off_score_as_the_base():
    base = tiny_model("llama")
    wanted = score_tokens(base, BATCH).logps
    model = with_adapter(base)
    assert not torch.allclose(score_tokens(model, BATCH).logps, wanted)
    with model.disable_adapter():
        assert_close(score_tokens(model, BATCH).logps, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("config", list(CONFIGS.values()), ids=list(CONFIGS))
def test_e7_an_engine_gets_base_plus_adapter_and_after_100_times_the_base_is_bit_equal(
    config, dtype
):
    model = with_adapter(tiny_model("llama", dtype=dtype, tie_word_embeddings=False), **config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(100):
        merged = dict(merged_weights(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    engine = tiny_model("llama", dtype=dtype, tie_word_embeddings=False)
    engine.load_state_dict(merged, strict=True)
    assert all(value.dtype == dtype for value in merged.values())
    if dtype is torch.float32:
        assert_close(score_tokens(engine, BATCH).logps, score_tokens(model, BATCH).logps, atol=1e-5)


def test_e7_a_merged_lora_weight_is_w_plus_scaled_b_a_rounded_once():
    model = with_adapter(tiny_model("llama").to(torch.bfloat16), r=4, lora_alpha=12)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    wanted = (layer.base_layer.weight.double() + 3.0 * b @ a).to(torch.bfloat16)
    merged = dict(merged_weights(model))["model.layers.0.self_attn.q_proj.weight"]
    assert_close(merged, wanted, rtol=4e-3)
    assert float((merged == wanted).float().mean()) > 0.99


def test_the_weights_of_a_model_without_adapters_are_its_own():
    model = tiny_model("gpt2")
    merged = dict(merged_weights(model))
    assert merged.keys() == model.state_dict().keys()
    assert all(torch.equal(merged[name], value) for name, value in model.state_dict().items())


def test_new_tokens_are_saved_with_the_adapter_and_score_the_same_after_loading(tmp_path):
    base = tiny_model("llama", tie_word_embeddings=True)
    base.resize_token_embeddings(131, mean_resizing=False)
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    model = with_adapter(base, trainable_token_indices=[128, 129, 130])
    batch = CompletionBatch.from_ids([[5, 128]], [[129, 6, 130]], [0])
    wanted = score_tokens(model, batch).logps
    model.save_pretrained(tmp_path)
    fresh = tiny_model("llama", tie_word_embeddings=True)
    fresh.resize_token_embeddings(131, mean_resizing=False)
    fresh.load_state_dict(weights)
    loaded = PeftModel.from_pretrained(fresh, tmp_path)
    assert_close(score_tokens(loaded, batch).logps, wanted)


def test_virtual_tokens_are_refused_because_they_shift_every_position():
    from peft import PromptTuningConfig

    model = get_peft_model(
        tiny_model("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(ValueError, match="virtual tokens"):
        score_tokens(model, BATCH)
