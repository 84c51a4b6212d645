from __future__ import annotations

import importlib.util
import json
import pickle
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from closeness import assert_close
from rl_models import (
    CompletionBatch,
    ModelLoadError,
    check_tokenizer,
    load_causal_lm,
    load_tokenizer,
    score_tokens,
)
from rl_models.testing import tiny_model, tiny_tokenizer

BATCH = CompletionBatch.from_ids([[5, 6, 7]], [[8, 9]], [0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", num_hidden_layers=3).save_pretrained(path, max_shard_size="40KB")
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def spoiled(folder, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(folder, tmp_path / "copy")


def error_of(path, **options) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_causal_lm(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_loads_in_float32_with_its_own_weights(folder):
    model = load_causal_lm(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    wanted = tiny_model("llama", num_hidden_layers=3)
    assert torch.equal(score_tokens(model, BATCH).logps, score_tokens(wanted, BATCH).logps)
    half = load_causal_lm(str(folder), dtype="bfloat16", attn_implementation="eager")
    assert half.dtype == torch.bfloat16
    tokenizer = load_tokenizer(folder)
    check_tokenizer(tokenizer, model)
    assert tokenizer("1 + 2")["input_ids"] == tiny_tokenizer()("1 + 2")["input_ids"]


@pytest.mark.parametrize("path", ["{tmp}/none", "./none", "a/b/c", "x.gguf", "", "{tmp_name}/none"])
def test_a_path_that_is_not_there_is_named(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    path = path.format(tmp=tmp_path, tmp_name=tmp_path.name)
    assert f"there is no file or folder {path!r}" in error_of(path)
    with pytest.raises(ModelLoadError, match="there is no file or folder"):
        load_tokenizer(path)


def test_a_safetensors_file_that_was_cut_is_named(spoiled):
    file = sorted(spoiled.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])
    message = error_of(spoiled)
    assert file.name in message
    assert "cut or corrupt" in message


@pytest.mark.parametrize("content", [b"", b"no header at all, just words", b"\xff" * 64])
def test_a_safetensors_file_that_is_none_is_named(spoiled, content):
    file = sorted(spoiled.glob("*.safetensors"))[0]
    file.write_bytes(content)
    assert file.name in error_of(spoiled)


def test_a_missing_shard_is_named(spoiled):
    file = sorted(spoiled.glob("*.safetensors"))[0]
    file.unlink()
    assert f"lacks {file.name}" in error_of(spoiled)


def test_weights_that_the_files_lack_are_never_made_up(tmp_path):
    tiny_model("llama", tie_word_embeddings=False).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = error_of(tmp_path)
    assert "lacks 1 weights" in message
    assert "lm_head.weight" in message


def test_weights_of_another_shape_are_refused(spoiled):
    settings = spoiled / "config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "intermediate_size": 64}))
    assert "shape" in error_of(spoiled)


def test_a_pickle_is_never_opened(spoiled, tmp_path):
    for file in spoiled.glob("model*"):
        file.unlink()

    class Harm:
        def __reduce__(self):
            return (tmp_path.joinpath("harm").touch, ())

    (spoiled / "pytorch_model.bin").write_bytes(pickle.dumps(Harm()))
    message = error_of(spoiled)
    assert "only pickled weights (pytorch_model.bin)" in message
    assert not (tmp_path / "harm").exists()
    (spoiled / "pytorch_model.bin").unlink()
    assert "no weights" in error_of(spoiled)


def test_code_in_a_model_folder_is_not_run_unless_trusted(spoiled, tmp_path):
    settings = spoiled / "config.json"
    content = json.loads(settings.read_text()) | {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"},
    }
    settings.write_text(json.dumps(content))
    (spoiled / "mine.py").write_text(f"open({str(tmp_path / 'harm')!r}, 'w')")
    assert "trust_remote_code" in error_of(spoiled)
    assert not (tmp_path / "harm").exists()


def test_a_config_that_is_no_json_is_one_line(spoiled):
    (spoiled / "config.json").write_text("{")
    assert str(spoiled) in error_of(spoiled)


def test_a_tokenizer_of_the_wrong_size_is_refused():
    with pytest.raises(ModelLoadError, match="ids go up to 100, but the model embeds 64 tokens"):
        check_tokenizer(tiny_tokenizer(), tiny_model("llama", vocab_size=64))
    check_tokenizer(tiny_tokenizer(), tiny_model("llama", vocab_size=101))


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_i2_a_missing_extra_says_what_to_install(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for kind in ("4bit", "8bit"):
        assert "pip install 'rl-models[bitsandbytes]'" in error_of(folder, quantization=kind)
    (tmp_path / "model.gguf").touch()
    assert "pip install 'rl-models[gguf]'" in error_of(tmp_path)
    with pytest.raises(ModelLoadError, match=r"rl-models\[gguf\]"):
        load_tokenizer(tmp_path)
    assert "wanted None, '4bit' or '8bit'" in error_of(folder, quantization="2bit")


def test_4_bit_on_the_cpu_is_refused_because_training_would_get_no_gradient(folder, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert "loses gradients" in error_of(folder, quantization="4bit")


def write_gguf(path, model):
    """The tiny Llama as a GGUF file, its matrices in 8-bit blocks."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        array = value.float().numpy()
        for key, count in heads.items():
            if key in name:  # llama.cpp's order of the rotary halves
                array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2)
                array = array.reshape(value.shape)
        block = gguf.GGMLQuantizationType.F32
        if array.ndim == 2:
            block = gguf.GGMLQuantizationType.Q8_0
            array = gguf.quants.quantize(np.ascontiguousarray(array), block)
        target = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(
            f"{target}.weight" if "." not in target[-7:] else target, array, raw_dtype=block
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_dequantised_trains_and_saves(tmp_path):
    model = tiny_model("llama", tie_word_embeddings=False, hidden_size=64, intermediate_size=96)
    (tmp_path / "gguf").mkdir()
    write_gguf(tmp_path / "gguf" / "tiny.gguf", model)
    loaded = load_causal_lm(tmp_path / "gguf")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    for name, value in loaded.state_dict().items():
        assert_close(value, model.state_dict()[name], rtol=0, atol=1e-2)
    score_tokens(loaded, BATCH).logps.sum().backward()
    assert all(p.grad is not None for p in loaded.parameters())
    loaded.save_pretrained(tmp_path / "plain")
    again = load_causal_lm(tmp_path / "plain")
    assert torch.equal(score_tokens(again, BATCH).logps, score_tokens(loaded, BATCH).logps)
    by_file = load_causal_lm(tmp_path / "gguf" / "tiny.gguf", dtype=torch.bfloat16)
    assert by_file.dtype == torch.bfloat16


def test_several_gguf_files_or_another_file_are_refused(tmp_path):
    for name in ("a.gguf", "b.gguf", "notes.txt"):
        (tmp_path / name).touch()
    assert "several GGUF files (a.gguf, b.gguf)" in error_of(tmp_path)
    assert "not a .gguf one" in error_of(tmp_path / "notes.txt")
    assert "a.gguf" in error_of(tmp_path / "a.gguf") or "tmp" in error_of(tmp_path / "a.gguf")
    assert "dequantised to train" in error_of(tmp_path / "b.gguf", quantization="4bit")
