"""Models that score sequences: loading, the one scorer, value heads and references."""

from __future__ import annotations

from rl_models._version import __version__
from rl_models.adapters import adapters_off, merged_weights
from rl_models.batch import CompletionBatch, SequenceBatch
from rl_models.load import ModelLoadError, check_tokenizer, load_causal_lm, load_tokenizer
from rl_models.reference import (
    BaseReference,
    StartingReference,
    check_not_shared,
    create_reference_model,
    disable_dropout,
    move_towards,
)
from rl_models.reference_cache import CachedReference, weights_hash
from rl_models.scoring import TokenScores, final_states, score_tokens
from rl_models.tokenizer_files import save_tokenizer
from rl_models.value_head import AutoModelForCausalLMWithValueHead, ValueHead
from rl_models.wrapper import PreTrainedModelWrapper

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "BaseReference",
    "CachedReference",
    "CompletionBatch",
    "ModelLoadError",
    "PreTrainedModelWrapper",
    "SequenceBatch",
    "StartingReference",
    "TokenScores",
    "ValueHead",
    "__version__",
    "adapters_off",
    "check_not_shared",
    "check_tokenizer",
    "create_reference_model",
    "disable_dropout",
    "final_states",
    "load_causal_lm",
    "load_tokenizer",
    "merged_weights",
    "move_towards",
    "save_tokenizer",
    "score_tokens",
    "weights_hash",
]
