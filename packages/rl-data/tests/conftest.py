"""Tokenizers built offline, and chat templates from files."""

import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "data" / "templates"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# How templates spell control tokens; those that are not special in the models' tokenizers are
# listed apart.
SPELLED = re.compile(
    r"<[|｜][\w▁]+[|｜]>|</?think>|</?tool_call>|<(?:start|end)_of_turn>|\[/?[A-Z_]{3,}\]"
)
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END = {
    "qwen": "<|im_end|>",
    "smollm": "<|im_end|>",
    "chatml": "<|im_end|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "llama": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "gptoss": "<|return|>",
    "phi": "<|endoftext|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "lfm": "<|im_end|>",
}


def train_bpe():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        ["hello there world, the quick brown fox answers the question of the user"] * 20,
        trainers.BpeTrainer(
            vocab_size=330,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return made.to_str()


@pytest.fixture(scope="session")
def bpe():
    return train_bpe()


@pytest.fixture(scope="session")
def make_tokenizer(bpe):
    """A byte-level BPE tokenizer with a template, whose control tokens are added tokens."""

    def make(template=CHATML, *, bos="<s>", eos="<|im_end|>", extra=(), adds_bos=False, **options):
        backend = Tokenizer.from_str(bpe)
        spelled = sorted({*SPELLED.findall(template), *extra})
        special = [t for t in [bos, eos, *spelled] if t and t not in NOT_SPECIAL]
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
        plain = [t for t in spelled if t in NOT_SPECIAL]
        backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
        if adds_bos:
            from tokenizers.processors import TemplateProcessing

            backend.post_processor = TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
            )
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token=bos,
            eos_token=eos,
            chat_template=template,
            **options,
        )

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer):
    """ChatML, no BOS added by the tokenizer."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def model_tokenizer(make_tokenizer):
    """The tokenizer for one of the template files."""

    def make(name, template=None):
        text = template or (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        eos = next((v for k, v in END.items() if name.startswith(k)), "</s>")
        extra = ("<|user|>", "<|assistant|>", "<|system|>") if name.startswith("phi") else ()
        return make_tokenizer(text, eos=eos, extra=extra)

    return make


@pytest.fixture(scope="session")
def template_text():
    return lambda name: (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
