"""Tiny models by architecture and a tiny tokenizer, built offline, for anyone's tests."""

from __future__ import annotations

import string
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Far from the usual 0.02, at which every next-token distribution is flat and no fault shows.
    "initializer_range": 0.3,
}
_FOUR_HEADS = {"num_key_value_heads": 4}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}

#: What each architecture needs beyond the common sizes. Windows are shorter than the prompts.
ARCHITECTURES: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "llama": {},
        "qwen3": {"head_dim": 8},
        "gpt2": {"n_inner": 48, **_FOUR_HEADS},
        "gemma2": {"head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 3.0},
        "gemma3_text": {"head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 3.0},
        "mistral": {"sliding_window": 4},
        "phi3": {},
        "gpt_neox": _FOUR_HEADS,
        "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
        "bloom": {"n_layer": 2, "n_head": 4},
        "cohere": {"logit_scale": 0.25},
        "granite": {"logits_scaling": 4.0},
        "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 16, **_EXPERTS},
        "gpt_oss": {"head_dim": 8, "sliding_window": 4, **_EXPERTS},
        "mamba": {"state_size": 4, "time_step_rank": 4},
        "lfm2": {"layer_types": ["conv", "full_attention"]},
        "qwen3_next": {
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            **_EXPERTS,
        },
    }
)


def tiny_model(
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> PreTrainedModel:
    """A random model of an architecture, 2 layers of width 32, in eval mode, built without network.

    Args:
        architecture: one of `ARCHITECTURES` (transformers' model types).
        seed: of the weights; the global random state is left as it was.
        dtype: of the weights.
        overrides: configuration fields, e.g. `vocab_size=len(tokenizer)`, `attention_dropout=0.5`.

    Raises:
        ValueError: an architecture that has no tiny configuration here.

    Example:
        >>> tiny_model("gpt2").config.n_embd
        32
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"no tiny configuration of {architecture!r}; there is {', '.join(ARCHITECTURES)}"
        )
    config = AutoConfig.for_model(
        architecture, **{**_COMMON, **ARCHITECTURES[architecture], **overrides}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(
    *, chat_template: str | None = TINY_CHAT_TEMPLATE, adds_bos: bool = False
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a printable ASCII character, 101 ids, built without network.

    Ids: 0 `<pad>`, 1 `<s>` (BOS), 2 `<|im_end|>` (EOS), 3 `<unk>`, 4 `<|im_start|>`, characters.

    Args:
        chat_template: ChatML by default; None for a tokenizer without one.
        adds_bos: put the BOS before every text that is encoded with special tokens.

    Example:
        >>> tokenizer = tiny_tokenizer()
        >>> tokenizer.decode(tokenizer("1 + 2")["input_ids"])
        '1 + 2'
    """
    special = ["<pad>", "<s>", "<|im_end|>", "<unk>", "<|im_start|>"]
    characters = [*"\n", *(c for c in string.printable if c.isprintable())]
    vocabulary = {token: place for place, token in enumerate(special + characters)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    if adds_bos:
        from tokenizers.processors import TemplateProcessing

        backend.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
