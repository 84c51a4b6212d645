"""SFT, GRPO and their kin for language models: exact, and telling what they do.

Names are imported when they are first used, so that ``import rl_trainers`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_trainers._version import __version__

if TYPE_CHECKING:
    from rl_trainers.grpo import GRPOConfig, GRPOTrainer
    from rl_trainers.sft import SFTConfig, SFTTrainer

_HOMES = {
    "GRPOConfig": "rl_trainers.grpo",
    "GRPOTrainer": "rl_trainers.grpo",
    "SFTConfig": "rl_trainers.sft",
    "SFTTrainer": "rl_trainers.sft",
}

__all__ = ["GRPOConfig", "GRPOTrainer", "SFTConfig", "SFTTrainer", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rl_trainers' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
