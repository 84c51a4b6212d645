"""Models that score sequences: loading, the one scorer, value heads and references."""

from __future__ import annotations

from rl_models._version import __version__
from rl_models.batch import CompletionBatch, SequenceBatch
from rl_models.load import ModelLoadError, check_tokenizer, load_causal_lm, load_tokenizer
from rl_models.scoring import TokenScores, score_tokens

__all__ = [
    "CompletionBatch",
    "ModelLoadError",
    "SequenceBatch",
    "TokenScores",
    "__version__",
    "check_tokenizer",
    "load_causal_lm",
    "load_tokenizer",
    "score_tokens",
]
