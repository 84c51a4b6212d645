"""Rows to tokenised batches with exact masks: chat templates, packing, audit."""

from __future__ import annotations

from ._version import __version__
from .audit import AuditError, AuditReport, audit
from .chat import apply_chat_template, maybe_apply_chat_template
from .collate import PreferenceCollator, SFTCollator, UnpairedCollator
from .faults import RowError
from .formats import detect_format, is_conversational, maybe_convert_to_chatml
from .packing import pack_dataset
from .preference import (
    maybe_unpair_preference_dataset,
    prepare_preference_dataset,
    prepare_unpaired_dataset,
    unpair_preference_dataset,
)
from .prompts import TokenizedPrompt, extract_prompt, maybe_extract_prompt, tokenize_prompt
from .report import Report
from .tokenization import prepare_sft_dataset

__all__ = [
    "AuditError",
    "AuditReport",
    "PreferenceCollator",
    "Report",
    "RowError",
    "SFTCollator",
    "TokenizedPrompt",
    "UnpairedCollator",
    "__version__",
    "apply_chat_template",
    "audit",
    "detect_format",
    "extract_prompt",
    "is_conversational",
    "maybe_apply_chat_template",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "pack_dataset",
    "prepare_preference_dataset",
    "prepare_sft_dataset",
    "prepare_unpaired_dataset",
    "tokenize_prompt",
    "unpair_preference_dataset",
]
