"""The one base config: ``TrainingArguments`` with defaults that suit post-training."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments


@dataclass
class BaseConfig(TrainingArguments):
    """Settings that all trainers share, over those of ``transformers.TrainingArguments``.

    Differences from its parent, each because the parent's default loses something here:

    - ``bf16=None`` chooses bf16 autocast where the hardware computes in it, float32 elsewhere;
    - on a machine without an accelerator ``use_cpu`` is set, instead of failing;
    - ``remove_unused_columns=False``: reward functions see every column, and the data layer
      chooses what reaches the model;
    - ``logging_nan_inf_filter=False``: a loss that is not finite is shown, not averaged away.

    Raises:
        ValueError: an option that these trainers would ignore was set.
    """

    bf16: bool | None = field(  # type: ignore[assignment]  # None: chosen by the hardware
        default=None,
        metadata={"help": "bf16 autocast; None chooses it where the hardware computes in bf16."},
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Must stay false: the data layer chooses the columns."}
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Hide losses that are not finite; false shows them."}
    )
    logging_steps: float = field(
        default=10, metadata={"help": "A log line every so many optimiser steps."}
    )
    audit_rows: int = field(
        default=200,
        metadata={"help": "Rows of the dataset to look through before training; 0: none."},
    )
    disable_dropout: bool = field(
        default=True,
        metadata={"help": "Set the model's dropout to 0; policy and reference then agree."},
    )
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Keywords for load_causal_lm, when the model is given by name."},
    )

    def __post_init__(self) -> None:
        if not _accelerator_is_there():
            self.use_cpu = True
        if self.bf16 is None:
            self.bf16 = not self.fp16 and computes_in_bf16(use_cpu=self.use_cpu)
        super().__post_init__()
        self.model_init_kwargs = as_mapping("model_init_kwargs", self.model_init_kwargs)
        self._refuse_ignored_options()

    def _refuse_ignored_options(self) -> None:
        refused = {
            "remove_unused_columns": (
                self.remove_unused_columns,
                "the data layer chooses the columns, and reward functions see all of them",
            ),
            "label_smoothing_factor": (
                self.label_smoothing_factor != 0,
                "these trainers compute their own loss, which it would not reach",
            ),
            "auto_find_batch_size": (
                self.auto_find_batch_size,
                "a changed batch size would change the run; lower per_device_train_batch_size and "
                "raise gradient_accumulation_steps, which leaves the gradient as it is",
            ),
            "use_liger_kernel": (
                self.use_liger_kernel,
                "the log-probabilities are computed by rl_ops, which fuses head and softmax itself",
            ),
        }
        for name, (is_set, why) in refused.items():
            if is_set:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no effect here: {why}. Unset it"
                )


def as_mapping(name: str, value: dict[str, Any] | str | None) -> dict[str, Any]:
    """A mapping given as such, as JSON (on the command line), or not at all.

    Raises:
        ValueError: text that is no JSON object, with the field's name.
    """
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}={value!r} is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f'{name}={value!r}: write an object, such as {{"key": 1}}')
    return parsed


def computes_in_bf16(*, use_cpu: bool) -> bool:
    """Whether the device that will be used multiplies bf16 numbers natively."""
    if not use_cpu:
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux: nothing says so, and float32 is right everywhere
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _accelerator_is_there() -> bool:
    return torch.accelerator.is_available() if hasattr(torch, "accelerator") else _cuda_or_mps()


def _cuda_or_mps() -> bool:
    return torch.cuda.is_available() or torch.backends.mps.is_available()
