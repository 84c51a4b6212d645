from __future__ import annotations

import json

import pytest

from rl_models import load_tokenizer, save_tokenizer
from rl_models.testing import tiny_tokenizer


@pytest.fixture
def folder(tmp_path):
    """A tokenizer's folder in a hand-written form that saving anew would not keep."""
    path = tmp_path / "source"
    tiny_tokenizer().save_pretrained(path)
    settings = path / "tokenizer_config.json"
    content = dict(reversed(json.loads(settings.read_text()).items()))
    settings.write_text(json.dumps(content, indent=7))
    return path


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_g4_files_are_byte_equal_after_use_with_padding_and_truncation(folder, tmp_path):
    tokenizer = load_tokenizer(folder)
    tokenizer(["1 + 2", "3"], padding=True, truncation=True, max_length=2)
    assert save_tokenizer(tokenizer, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folder)
    assert save_tokenizer(tokenizer, folder)


@pytest.mark.parametrize("change", ["template", "token"])
def test_g4_a_changed_tokenizer_is_saved_as_it_is_now(folder, tmp_path, change):
    tokenizer = load_tokenizer(folder)
    if change == "template":
        tokenizer.chat_template = "{{ messages }}"
    else:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    assert not save_tokenizer(tokenizer, tmp_path / "out")
    again = load_tokenizer(tmp_path / "out")
    assert again.chat_template == tokenizer.chat_template
    assert again.get_vocab() == tokenizer.get_vocab()


def test_a_tokenizer_that_came_from_no_folder_is_saved_anew(tmp_path):
    assert not save_tokenizer(tiny_tokenizer(), tmp_path / "out")
    assert load_tokenizer(tmp_path / "out")("1")["input_ids"] == tiny_tokenizer()("1")["input_ids"]
