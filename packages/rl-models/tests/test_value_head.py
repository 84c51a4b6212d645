from __future__ import annotations

import importlib.util
import json
import os

import pytest
import torch
from huggingface_hub import HfApi
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from closeness import assert_close
from rl_models import (
    AutoModelForCausalLMWithValueHead,
    CompletionBatch,
    ModelLoadError,
    PreTrainedModelWrapper,
    ValueHead,
    score_tokens,
)
from rl_models.testing import tiny_model

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
LORA = LoraConfig(target_modules=["q_proj", "v_proj"])
WithHead = AutoModelForCausalLMWithValueHead


def test_g6_a_wrapped_model_object_gives_logits_loss_and_values_at_once():
    base = tiny_model("llama")
    model = WithHead(base)
    assert isinstance(model, PreTrainedModelWrapper)
    logits, loss, values = model(IDS, labels=IDS)
    out = base(IDS, labels=IDS, output_hidden_states=True)
    head = model.v_head.summary
    assert_close(logits, out.logits)
    assert_close(loss, out.loss)
    assert_close(values, out.hidden_states[-1].double() @ head.weight[0].double() + head.bias)
    assert model(IDS).loss is None
    assert torch.equal(
        WithHead.from_pretrained(base).pretrained_model.lm_head.weight, base.lm_head.weight
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shards", ["50GB", "20KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_g1_reloaded_values_are_bit_equal_and_the_base_loads_alone(
    tmp_path, architecture, shards, dtype
):
    model = WithHead(tiny_model(architecture, dtype=dtype, tie_word_embeddings=True)).eval()
    wanted = model(IDS)
    model.save_pretrained(tmp_path, max_shard_size=shards)
    assert (len(list(tmp_path.glob("model*.safetensors"))) > 1) == (shards == "20KB")
    again = WithHead.from_pretrained(tmp_path, dtype=dtype).eval()
    assert all(torch.equal(a, b) for a, b in zip(again(IDS)[::2], wanted[::2], strict=True))
    plain, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, output_loading_info=True
    )
    assert torch.equal(plain(IDS).logits.float(), wanted.logits)
    assert not any(info.values())
    assert set(load_file(tmp_path / "v_head.safetensors")) == {
        "v_head.summary.weight",
        "v_head.summary.bias",
    }
    assert not [*tmp_path.glob("*.bin"), *tmp_path.glob("*.partial")]


def test_g1_after_one_step_head_and_base_differ_from_their_start():
    model = WithHead(tiny_model("llama")).train()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = CompletionBatch.from_ids([[5, 6]], [[7, 8], [9]], [0, 0])
    scores = score_tokens(model, batch, return_hidden=True)
    (model.v_head(scores.hidden).square().sum() - scores.logps.sum()).backward()
    optimizer.step()
    same = [name for name, value in model.state_dict().items() if torch.equal(value, start[name])]
    assert same == []


def test_values_of_scored_tokens_are_those_of_the_position_before_each():
    model = WithHead(tiny_model("llama")).eval()
    batch = CompletionBatch.from_ids([[5, 6]], [[7, 8]], [0])
    values = model.v_head(score_tokens(model, batch, return_hidden=True).hidden)
    assert_close(values, model(torch.tensor([[5, 6, 7, 8]])).values[:, 1:3], atol=1e-5)


def test_g6_a_folder_without_a_head_is_an_error_unless_a_new_one_is_asked_for(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="new_v_head=True"):
        WithHead.from_pretrained(tmp_path)
    model = WithHead.from_pretrained(tmp_path, new_v_head=True, v_head_init_strategy="zero")
    assert not bool(model(IDS).values.any())


def test_a_head_kept_among_the_models_weights_is_found(tmp_path):
    model = WithHead(tiny_model("llama"))
    model.save_pretrained(tmp_path)
    head = load_file(tmp_path / "v_head.safetensors")
    (tmp_path / "v_head.safetensors").unlink()
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, **head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = WithHead.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).values, model(IDS).values)


def test_g1_a_head_on_a_model_with_an_adapter_is_saved_with_the_adapter(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    model = WithHead.from_pretrained(tmp_path / "base", peft_config=LORA, new_v_head=True)
    assert model.is_peft_model
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    model.save_pretrained(tmp_path / "tuned")
    files = {file.name for file in (tmp_path / "tuned").glob("*.safetensors")}
    assert files == {"adapter_model.safetensors", "v_head.safetensors"}
    again = WithHead.from_pretrained(tmp_path / "tuned")
    assert torch.equal(again(IDS).values, model.eval()(IDS).values)
    assert any(p.requires_grad for n, p in again.named_parameters() if "lora_" in n)
    frozen = WithHead.from_pretrained(tmp_path / "tuned", is_trainable=False)
    assert not any(p.requires_grad for n, p in frozen.named_parameters() if "lora_" in n)
    settings = tmp_path / "tuned" / "adapter_config.json"
    settings.write_text(
        json.dumps({**json.loads(settings.read_text()), "base_model_name_or_path": ""})
    )
    with pytest.raises(ModelLoadError, match="which model its adapter belongs to"):
        WithHead.from_pretrained(tmp_path / "tuned")


def test_options_of_the_head():
    torch.manual_seed(0)
    drawn = ValueHead(4096, init="normal", init_range=0.5).summary.weight.detach()
    assert float(drawn.std()) == pytest.approx(0.5, rel=0.05)
    with pytest.raises(ValueError, match="v_head_init_strategy='uniform'"):
        WithHead(tiny_model("llama"), v_head_init_strategy="uniform")
    model = WithHead(tiny_model("llama"), summary_dropout_prob=0.5)
    assert not torch.equal(model.train()(IDS).values, model(IDS).values)
    assert torch.equal(model.eval()(IDS).values, model(IDS).values)
    with pytest.raises(TypeError, match="dtype"):
        WithHead.from_pretrained(tiny_model("llama"), dtype=torch.bfloat16)


def test_i2_adapters_without_peft_say_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"pip install 'rl-models\[peft\]'"):
        WithHead.from_pretrained(tiny_model("llama"), peft_config=LORA)


def test_the_wrapper_generates_and_shows_the_models_settings():
    base = tiny_model("llama")
    model = WithHead(base)
    out = model.generate(IDS, max_new_tokens=3, do_sample=False)
    assert torch.equal(out, base.generate(IDS, max_new_tokens=3, do_sample=False))
    assert model.config is base.config
    with pytest.raises(AttributeError, match="nonsense"):
        model.nonsense  # noqa: B018


def test_saving_takes_the_state_that_a_trainer_gathered(tmp_path):
    model = WithHead(tiny_model("llama"))
    gathered = {name: value * 2 for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=gathered)
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["model.norm.weight"], 2 * model.model.norm.weight)


def test_push_to_hub_uploads_what_save_pretrained_writes(monkeypatch):
    seen = {}

    def upload(_, *, repo_id, folder_path, commit_message, **__):
        seen.update(repo_id=repo_id, files=os.listdir(folder_path), message=commit_message)
        return "https://hub/commit"

    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: None)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    assert WithHead(tiny_model("llama")).push_to_hub("me/model") == "https://hub/commit"
    assert {"config.json", "model.safetensors", "v_head.safetensors"} <= set(seen["files"])
    assert seen["message"] == "Upload AutoModelForCausalLMWithValueHead"
