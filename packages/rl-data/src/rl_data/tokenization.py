"""Datasets of rows to datasets of ids and masks, with a report of all that was cut or dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value

from .packing import STRATEGIES, Strategy, column_names, pack_dataset
from .report import CUT_AWAY, EMPTY, NO_TRAINED, Report
from .rows import RowTokenizer, Sample
from .show import show_trained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

NOTES = (
    "status",
    "cut",
    "tokens",
    "trained",
    "no_end",
    "unlocated",
    "empty_completion",
    "mismatch",
)


def truncate(
    ids: list[int], mask: list[int], max_length: int | None, side: str = "keep_start"
) -> tuple[list[int], list[int]]:
    """Cut a sample to ``max_length`` tokens, from its end or (``keep_end``) from its start.

    Nothing is added, and the first token that is left is not trained.

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


class RowsStep:
    """A batch of rows to columns, for ``dataset.map``.

    What it holds is the same in two runs with the same arguments, so that its hash is, and the
    cache is used.
    """

    lists: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()

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
        # Padding and truncation of an earlier call stay in the backend until the next; they are no
        # part of this step.
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            backend.no_padding()
            backend.no_truncation()
        return {**self.__dict__, "_rows": None}

    def rows_tokenizer(self) -> RowTokenizer:
        """Made at the first batch in each process."""
        if self._rows is None:
            self._rows = RowTokenizer(self.tokenizer, **self.options)
        return self._rows

    def samples(self, rows: list[dict[str, Any]], first_index: int) -> list[dict[str, Any]]:
        """The columns of each row."""
        raise NotImplementedError

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        """One batch of the map: lists of the rows kept, empty ones for others, and notes."""
        rows = [
            dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)
        ]
        made = self.samples(rows, indices[0] if indices else 0)
        for columns in made:
            if columns["status"]:
                columns.update({name: [] for name in self.lists})
        return {name: [m[name] for m in made] for name in (*self.lists, *self.scalars, *NOTES)}


class SFTStep(RowsStep):
    """A batch of rows to ids and loss masks."""

    lists: tuple[str, ...] = ("input_ids", "loss_mask")

    def samples(self, rows: list[dict[str, Any]], first_index: int) -> list[dict[str, Any]]:
        """Tokenise, cut and judge each row."""
        return [self._columns(s) for s in self.rows_tokenizer()(rows, first_index)]

    def __init__(self, *arguments: Any, packed: bool = False) -> None:
        super().__init__(*arguments)
        if packed:
            self.lists = (*self.lists, "position_ids")

    def _columns(self, sample: Sample) -> dict[str, Any]:
        own = sample.positions or list(range(len(sample.ids)))
        positions, _ = truncate(own, own, self.max_length, self.truncation_mode)
        ids, mask = truncate(sample.ids, sample.mask, self.max_length, self.truncation_mode)
        reason = ""
        if not ids:
            reason = EMPTY
        elif not any(mask):
            reason = CUT_AWAY if any(sample.mask) else NO_TRAINED
        return {
            "input_ids": ids,
            "loss_mask": mask,
            "position_ids": positions,
            "status": reason,
            "cut": len(sample.ids) - len(ids),
            "tokens": len(ids),
            "trained": sum(mask),
            "no_end": int(sample.no_end),
            "unlocated": sample.unlocated,
            "empty_completion": int(sample.empty_completion),
            "mismatch": sample.prompt_mismatch,
        }


def add_counts(report: Report, columns: Mapping[str, Any]) -> None:
    """Add a batch's notes to a report."""
    kept = np.array([not status for status in columns["status"]], dtype=bool)
    cut = np.asarray(columns["cut"])[kept]
    report.rows += len(kept)
    report.kept += int(kept.sum())
    for status in columns["status"]:
        if status:
            report.drop(status)
    report.cut_rows += int((cut > 0).sum())
    report.cut_tokens += int(cut.sum())
    report.tokens += int(np.asarray(columns["tokens"])[kept].sum())
    report.trained_tokens += int(np.asarray(columns["trained"])[kept].sum())
    report.no_end += int(np.sum(columns["no_end"]))
    report.unlocated_turns += int(np.sum(columns["unlocated"]))
    report.empty_completions += int(np.sum(columns["empty_completion"]))
    mismatches = [m for m in columns["mismatch"] if m]
    if mismatches and not report.prompt_not_prefix:
        report.prompt_not_prefix_example = mismatches[0]
    report.prompt_not_prefix += len(mismatches)


def run_step(
    dataset: Any, step: RowsStep, features: Features, num_proc: int | None = None
) -> tuple[Any, Report]:
    """Run a step over a dataset, drop the rows that it rejects, and count.

    For a map-style dataset the counts are columns of the cached table, so that they are there when
    the cache is used.
    """
    report = Report()
    if isinstance(dataset, IterableDataset):
        return _run_on_stream(dataset, step, features, report), report
    if not len(dataset):
        raise ValueError("the dataset has no rows: nothing to train on")
    mapped = dataset.map(
        step,
        batched=True,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=Features(
            {
                **features,
                **{n: Value("string" if n in ("status", "mismatch") else "int64") for n in NOTES},
            }
        ),
        num_proc=num_proc,
        desc="Tokenizing",
    )
    add_counts(report, {name: mapped[name][:] for name in NOTES})
    if report.kept == 0:
        first = step.rows_tokenizer()([dataset[0]])[0] if isinstance(step, SFTStep) else None
        shown = show_trained(step.tokenizer, first.ids, first.mask, color=False) if first else ""
        raise ValueError(
            f"no row can be trained. {' / '.join(str(report).splitlines())}"
            + (f"\nthe first row, trained tokens in ⟦ ⟧:\n{shown}" if shown else "")
        )
    if report.prompt_not_prefix:
        logger.warning(
            "%d rows: the prompt is not how prompt + completion begins (%s)",
            report.prompt_not_prefix,
            report.prompt_not_prefix_example,
        )
    if report.kept < report.rows:
        mapped = mapped.select([k for k, status in enumerate(mapped["status"]) if not status])
    return mapped.remove_columns(list(NOTES)), report


def _run_on_stream(
    dataset: IterableDataset, step: RowsStep, features: Features, report: Report
) -> IterableDataset:
    def tokenise(batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        columns = step(batch, indices)
        if indices and indices[0] == 0:  # a new pass over the stream
            vars(report).update(vars(Report(pack_length=report.pack_length)))
        add_counts(report, columns)
        keep = [k for k, status in enumerate(columns["status"]) if not status]
        return {name: [columns[name][k] for k in keep] for name in features}

    mapped = dataset.map(
        tokenise,
        batched=True,
        with_indices=True,
        remove_columns=column_names(dataset),
        features=features,
    )
    return mapped.select_columns(list(features))  # columns that the first row lacks are not removed


def prepare_sft_dataset(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
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
        dataset: map-style or streaming; rows of text, messages, prompt + completion (plain or
            conversational), or ``input_ids`` already (then taken as they are, with ``loss_mask`` or
            ``labels``, and ``position_ids`` if they are packed).
        tokenizer: a transformers tokenizer; conversations need its chat template.
        max_length: most tokens of a sample, or of a pack; None for no limit.
        truncation_mode: ``keep_start`` or ``keep_end``.
        packing: put several samples in one row of ``max_length``.
        packing_strategy: see `plan_packs`.
        completion_only_loss: train completions alone; None: where rows have them.
        assistant_only_loss: train the assistant's turns alone.
        train_header: where only turns are trained, train their headers too.
        dataset_text_field: column of plain texts.
        formatting_func: row to text.
        tools: tools for rows without a ``tools`` column.
        chat_template_kwargs: variables for the template.
        control_tokens: see `ChatRenderer`.
        num_proc: processes for map-style datasets.

    Returns:
        The dataset, with ``input_ids`` and ``loss_mask`` (1: trained; aligned with the ids, not
        shifted) and, when packed, ``position_ids`` and ``seq_lengths``; and the report, which for a
        streaming dataset fills as it is read.

    Raises:
        ValueError: options that do not go together, or a map-style dataset of which no row can be
            trained.
        RowError: a row of no known format.

    Example:
        >>> rows, report = prepare_sft_dataset(dataset, tokenizer)  # doctest: +SKIP
    """
    check_dataset(dataset)
    check_truncation(max_length, truncation_mode)
    if packing and max_length is None:
        raise ValueError("packing=True wants a max_length, the length of the packs; it is None")
    if packing_strategy not in STRATEGIES:
        raise ValueError(f"packing_strategy={packing_strategy!r}: want one of {STRATEGIES}")
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
    packed = "position_ids" in column_names(dataset)
    if packing and packed:
        raise ValueError("packing=True, but the rows bring position_ids: they are packed already")
    limit = None if splits else max_length
    step = SFTStep(tokenizer, limit, truncation_mode, options, packed=packed)
    features = Features({name: List(Value("int64")) for name in step.lists})
    prepared, report = run_step(dataset, step, features, num_proc)
    if packing and max_length is not None:
        prepared = _pack(prepared, report, max_length, packing_strategy)
    return prepared, report


def _pack(prepared: Any, report: Report, length: int, strategy: Strategy) -> Any:
    report.pack_length = length
    packed = pack_dataset(prepared, length, strategy, untrain_first=True)
    if isinstance(packed, Dataset):
        report.packs = len(packed)
    return packed


def check_dataset(dataset: Any) -> None:
    """Refuse what is no single dataset.

    Raises:
        ValueError: a dict of splits, a list of rows, or anything else.
    """
    if isinstance(dataset, Mapping):
        raise ValueError(f"the dataset is a dict of splits {list(dataset)}: pass one of them")
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise ValueError(
            f"the dataset is {type(dataset).__name__}, want a datasets.Dataset or IterableDataset; "
            "datasets.Dataset.from_list makes one of a list of rows"
        )


def check_truncation(max_length: int | None, truncation_mode: str) -> None:
    """Refuse limits that leave nothing to train, and unknown modes."""
    if max_length is not None and max_length < 2:
        raise ValueError(
            f"max_length={max_length}: want at least 2, as the first token of a sample is never "
            "trained"
        )
    if truncation_mode not in ("keep_start", "keep_end"):
        raise ValueError(f"truncation_mode={truncation_mode!r}: want 'keep_start' or 'keep_end'")
