"""Tiny models by architecture, built from configurations with random weights: for tests, offline."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_model(architecture: str = "llama", **overrides: Any) -> PreTrainedModel:
    """Tiny."""
    config = AutoConfig.for_model(architecture, **{**_COMMON, **overrides})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)
