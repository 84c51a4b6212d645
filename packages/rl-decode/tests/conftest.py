"""Small real tokenizers, trained here: the three kinds of vocabulary that decoders differ in."""

from __future__ import annotations

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Two plus two is four, and so is 2 + 2.",
    "def answer(x):\n    return x * 2\n\nprint(answer(21))  # 42",
    "Ünïcödé text: 東京 и Москва, naïve café, ¿qué?",
    "<think> reasoning </think> answer: 42. Stop here.\n\nUser: next question",
] * 8

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def add_tokens(tokenizer: Tokenizer, special: list[str], plain: list[str]) -> None:
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])


def byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_like(*, legacy: bool) -> Tokenizer:
    """Unigram with a metaspace and byte fallback, decoded the way Llama's tokenizer is.

    ``legacy`` puts the first space by a normalizer, before every stretch between added tokens.
    """
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first")
    first = Tokenizer(models.Unigram())
    first.pre_tokenizer = metaspace
    trainer = trainers.UnigramTrainer(
        vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    first.train_from_iterator([line for line in CORPUS if "東" not in line], trainer)
    scores = sorted(first.get_vocab().items(), key=lambda item: item[1])
    pieces = [
        (piece, 0.0 if piece == "<unk>" else -5.0 - n / 50) for n, (piece, _) in enumerate(scores)
    ]
    pieces += [(f"<0x{value:02X}>", -20.0) for value in range(256)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = metaspace
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def wrapped(tokenizer: Tokenizer, **names: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=True, **names
    )


def sentencepiece_wrapped(*, legacy: bool) -> PreTrainedTokenizerFast:
    inner = sentencepiece_like(legacy=legacy)
    add_tokens(inner, ["<s>", "</s>", "<pad>", "[THINK]", "[/THINK]"], [])
    return wrapped(inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="session")
def bpe() -> PreTrainedTokenizerFast:
    """ChatML: the end of a turn is not the end of text; think tags are ordinary added tokens."""
    inner = byte_level_bpe()
    special = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<|tool|>"]
    add_tokens(inner, special, ["<think>", "</think>"])
    tokenizer = wrapped(inner, eos_token="<|endoftext|>", pad_token="<|pad|>")
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session")
def plain_bpe() -> PreTrainedTokenizerFast:
    """No padding id of its own, no reasoning tags in the vocabulary, no template."""
    inner = byte_level_bpe()
    add_tokens(inner, ["<|endoftext|>"], [])
    return wrapped(inner, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


@pytest.fixture(scope="session")
def sp() -> PreTrainedTokenizerFast:
    """SentencePiece style; the reasoning markers are special tokens, as Mistral's are."""
    return sentencepiece_wrapped(legacy=False)


@pytest.fixture(scope="session")
def legacy_sp() -> PreTrainedTokenizerFast:
    return sentencepiece_wrapped(legacy=True)


@pytest.fixture(scope="session")
def bert() -> PreTrainedTokenizerFast:
    inner = wordpiece()
    add_tokens(inner, ["[SEP]", "[PAD]"], [])
    return wrapped(inner, eos_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]")


@pytest.fixture(params=["bpe", "plain_bpe", "sp", "legacy_sp", "bert"])
def any_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def with_tokens():
    """A byte-level tokenizer with the given special tokens added, ``<eos>`` among them."""

    def build(*tokens: str, template: str | None = None) -> PreTrainedTokenizerFast:
        inner = byte_level_bpe()
        add_tokens(inner, ["<eos>", *tokens], [])
        tokenizer = wrapped(inner, eos_token="<eos>")
        tokenizer.chat_template = template
        return tokenizer

    return build
