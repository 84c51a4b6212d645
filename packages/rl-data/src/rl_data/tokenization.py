"""Datasets of rows to datasets of token ids and loss masks, with a report of all that was cut or dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value

from .packing import STRATEGIES, Strategy, column_names, pack_dataset
from .report import CUT_AWAY, EMPTY, NO_TRAINED, Report
from .rows import RowTokenizer, Sample

logger = logging.getLogger(__name__)

NOTES = ("status", "cut", "trained", "no_end", "unlocated", "empty_completion", "mismatch")
DROPPED = ("", CUT_AWAY, NO_TRAINED, EMPTY)


def truncate(
    ids: list[int], mask: list[int], max_length: int | None, side: str = "keep_start"
) -> tuple[list[int], list[int]]:
    """Cut a sample to ``max_length`` tokens, from its end or (``keep_end``) from its start; nothing is added.

    Example:
        >>> truncate([1, 2, 3, 4], [0, 0, 1, 1], 3, "keep_end")
        ([2, 3, 4], [0, 1, 1])
    """
    if max_length is None or len(ids) <= max_length:
        return ids, mask
    if side == "keep_end":
        ids, mask = ids[-max_length:], mask[-max_length:]
    else:
        ids, mask = ids[:max_length], mask[:max_length]
    return ids, [0, *mask[1:]]


class SFTStep:
    """A batch of rows to columns; holds nothing that differs between two runs, so that its hash is stable."""

    def __init__(
        self,
        tokenizer: Any,
        max_length: int | None,
        truncation_mode: str,
        options: Mapping[str, Any],
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.truncation_mode = truncation_mode
        self.options = dict(options)
        self._rows: RowTokenizer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        if self._rows is None:
            self._rows = RowTokenizer(self.tokenizer, **self.options)
        rows = [
            dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)
        ]
        samples = self._rows(rows, first_index=indices[0] if indices else 0)
        out: dict[str, list[Any]] = {name: [] for name in ("input_ids", "loss_mask", *NOTES)}
        for sample in samples:
            self._append(out, sample)
        return out

    def _append(self, out: dict[str, list[Any]], sample: Sample) -> None:
        ids, mask = truncate(sample.ids, sample.mask, self.max_length, self.truncation_mode)
        trained = sum(mask)
        status = 0
        if not ids:
            status = DROPPED.index(EMPTY)
        elif not trained:
            status = DROPPED.index(CUT_AWAY if any(sample.mask) else NO_TRAINED)
        out["input_ids"].append(ids if not status else [])
        out["loss_mask"].append(mask if not status else [])
        out["status"].append(status)
        out["cut"].append(len(sample.ids) - len(ids) if not status else 0)
        out["trained"].append(trained)
        out["no_end"].append(int(sample.no_end))
        out["unlocated"].append(sample.unlocated)
        out["empty_completion"].append(int(sample.empty_completion))
        out["mismatch"].append(sample.prompt_mismatch)


def add_counts(report: Report, columns: Mapping[str, Any]) -> None:
    """Add a batch's notes to a report."""
    status = np.asarray(columns["status"])
    kept = status == 0
    cut = np.asarray(columns["cut"])[kept]
    report.rows += len(status)
    report.kept += int(kept.sum())
    for code, reason in enumerate(DROPPED):
        if code:
            report.drop(reason, int((status == code).sum()))
    report.cut_rows += int((cut > 0).sum())
    report.cut_tokens += int(cut.sum())
    report.trained_tokens += int(np.asarray(columns["trained"])[kept].sum())
    report.no_end += int(np.sum(columns["no_end"]))
    report.unlocated_turns += int(np.sum(columns["unlocated"]))
    report.empty_completions += int(np.sum(columns["empty_completion"]))
    mismatches = [m for m in columns["mismatch"] if m]
    report.prompt_not_prefix += len(mismatches)
    if mismatches and not report.prompt_not_prefix_example:
        report.prompt_not_prefix_example = mismatches[0]


def prepare_sft_dataset(
    dataset: Any,
    tokenizer: Any,
    *,
    max_length: int | None = 1024,
    truncation_mode: str = "keep_start",
    packing: bool = False,
    packing_strategy: Strategy = "bfd",
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    train_header: bool = False,
    dataset_text_field: str = "text",
    formatting_func: Callable[[Mapping[str, Any]], str] | None = None,
    tools: list[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    control_tokens: str = "user",
    num_proc: int | None = None,
) -> tuple[Any, Report]:
    """Tokenise a dataset for supervised training.

    Args:
        dataset: map-style or streaming; rows of text, messages, prompt + completion (plain or conversational), or
            ``input_ids`` already (then taken as they are, with ``loss_mask`` or ``labels`` if there are any).
        tokenizer: a transformers tokenizer; conversations need its chat template.
        max_length: most tokens of a sample, or of a pack; None for no limit.
        truncation_mode: ``keep_start`` or ``keep_end``.
        packing: put several samples in one row of ``max_length``.
        packing_strategy: see `plan_packs`.
        completion_only_loss: train completions alone; None: where rows have them.
        assistant_only_loss: train the assistant's turns alone.
        train_header: with these, train the header of the turns too.
        dataset_text_field: column of plain texts.
        formatting_func: row to text.
        tools: tools for rows without a ``tools`` column.
        chat_template_kwargs: variables for the template.
        control_tokens: see `ChatRenderer`.
        num_proc: processes for map-style datasets.

    Returns:
        The dataset, with ``input_ids`` and ``loss_mask`` (1: trained; aligned with the ids, not shifted) and, when
        packed, ``position_ids`` and ``seq_lengths``; and the report, which for a streaming dataset fills as it is read.

    Raises:
        ValueError: options that do not go together, or a map-style dataset of which no row can be trained.
        RowError: a row of no known format.

    Example:
        >>> rows, report = prepare_sft_dataset(dataset, tokenizer, assistant_only_loss=True)  # doctest: +SKIP
    """
    _check_options(max_length, truncation_mode, packing, packing_strategy)
    splits = packing and packing_strategy != "bfd"
    options = {
        "completion_only_loss": completion_only_loss,
        "assistant_only_loss": assistant_only_loss,
        "train_header": train_header,
        "dataset_text_field": dataset_text_field,
        "formatting_func": formatting_func,
        "tools": tools,
        "chat_template_kwargs": chat_template_kwargs,
        "control_tokens": control_tokens,
        "features": dataset.features,
    }
    step = SFTStep(tokenizer, None if splits else max_length, truncation_mode, options)
    report = Report()
    if isinstance(dataset, IterableDataset):
        prepared: Any = _prepare_stream(dataset, step, report)
    else:
        prepared = _prepare_table(dataset, step, report, num_proc)
    if packing and max_length is not None:
        report.pack_length = max_length
        prepared = pack_dataset(prepared, max_length, packing_strategy, untrain_first=True)
        if isinstance(prepared, Dataset):
            report.packs = len(prepared)
    return prepared, report


def _check_options(
    max_length: int | None, truncation_mode: str, packing: bool, strategy: str
) -> None:
    if max_length is not None and max_length < 2:
        raise ValueError(
            f"max_length={max_length}: want at least 2, as the first token of a sample is never trained"
        )
    if truncation_mode not in ("keep_start", "keep_end"):
        raise ValueError(f"truncation_mode={truncation_mode!r}: want 'keep_start' or 'keep_end'")
    if packing and max_length is None:
        raise ValueError("packing=True wants a max_length, the length of the packs; it is None")
    if strategy not in STRATEGIES:
        raise ValueError(f"packing_strategy={strategy!r}: want one of {STRATEGIES}")


def _prepare_table(
    dataset: Dataset, step: SFTStep, report: Report, num_proc: int | None
) -> Dataset:
    mapped = dataset.map(
        step,
        batched=True,
        with_indices=True,
        remove_columns=dataset.column_names,
        num_proc=num_proc,
        desc="Tokenizing",
    )
    if len(mapped):
        add_counts(report, {name: mapped[name][:] for name in NOTES})
    report.tokens = int(sum(len(i) for i in mapped["input_ids"])) if len(mapped) else 0
    if report.kept == 0:
        raise ValueError(f"no row can be trained: {report}")
    keep = np.flatnonzero(np.asarray(mapped["status"][:]) == 0)
    if len(keep) < len(mapped):
        mapped = mapped.select(keep)
    return mapped.remove_columns(list(NOTES))


def _prepare_stream(dataset: IterableDataset, step: SFTStep, report: Report) -> IterableDataset:
    def tokenise(batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        columns = step(batch, indices)
        add_counts(report, columns)
        keep = [k for k, status in enumerate(columns["status"]) if status == 0]
        report.tokens += sum(len(columns["input_ids"][k]) for k in keep)
        return {name: [columns[name][k] for k in keep] for name in ("input_ids", "loss_mask")}

    return dataset.map(
        tokenise,
        batched=True,
        with_indices=True,
        remove_columns=column_names(dataset),
        features=Features({"input_ids": List(Value("int64")), "loss_mask": List(Value("int64"))}),
    )
