"""A look at a dataset before training: what would be lost, doubled or mislabelled, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset, IterableDataset

from .checks import conversations, count_nulls, has_doubled_eos, has_empty_text, role_fault
from .encoding import Encoder
from .faults import RowError
from .formats import detect_format, maybe_convert_to_chatml
from .preference import completion_row, empty_side, split_pair, split_sides, truncate_pair
from .prompts import tokenize_prompt
from .report import EQUAL_AFTER_CUT, EQUAL_PAIR
from .rows import RowTokenizer, Sample
from .show import show_trained
from .tokenization import check_truncation, truncate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 1000
STREAM_ROWS = 1000
PERCENTILES = (50, 90, 95, 99, 100)
FAULTS = {
    "unreadable": "rows that cannot be prepared",
    "no_trained_token": "rows without a trained token",
    "lost_eos": "rows whose end is cut away",
    "cut": "rows cut to max_length",
    "no_end": "rows that end in no special token",
    "doubled_eos": "rows with two EOS at the end",
    "equal_pairs": "pairs whose sides are equal",
    "equal_after_cut": "pairs whose sides differ only past max_length",
    "prompt_not_prefix": "rows whose prompt is not how the whole begins",
    "role_order": "conversations with roles out of order",
    "empty_text": "rows with an empty text",
    "unlocated": "assistant's turns not found in the rendering",
}
MENDED = {
    "doubled_bos": "rows with two BOS (one is left out)",
    "filled_nulls": "keys that a table filled with None (they are left out)",
}


class AuditError(ValueError):
    """A strict audit found faults.

    Attributes:
        report: all of what it found.
    """

    def __init__(self, report: AuditReport) -> None:
        super().__init__(f"the data audit found {', '.join(report.fault_list())}\n{report}")
        self.report = report


@dataclass
class AuditReport:
    """What an audit found.

    Attributes:
        rows: rows looked at.
        total_rows: rows of the dataset, None for a stream.
        formats: rows of each format.
        counts: how often each fault was met (keys of `FAULTS` and `MENDED`).
        examples: for each fault, the first row with it and what was seen.
        lengths: token length percentiles before cutting, by percentile.
        tokens: tokens of all rows before cutting.
        trained_tokens: trained tokens after cutting.
        example_ids: a row's ids, the first one with a trained token, or the first at all.
        example_mask: its mask.
        tokenizer: decodes the example.
    """

    rows: int = 0
    total_rows: int | None = None
    formats: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    trained_tokens: int = 0
    example_ids: list[int] = field(default_factory=list)
    example_mask: list[int] = field(default_factory=list)
    tokenizer: Any = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        """Whether no fault was found; things that the preparation mends are none."""
        return not any(self.counts[name] for name in FAULTS)

    def fault_list(self) -> list[str]:
        """The faults found, with counts, in words."""
        return [
            f"{self.counts[name]:,} {words}" for name, words in FAULTS.items() if self.counts[name]
        ]

    def summary(self) -> str:
        """One line."""
        of = "" if self.total_rows in (None, self.rows) else f" of {self.total_rows:,}"
        found = "all well" if self.ok else "; ".join(self.fault_list())
        return (
            f"data audit of {self.rows:,}{of} rows: {found} "
            f"({self.trained_tokens:,} of {self.tokens:,} tokens trained, longest row "
            f"{self.lengths.get(100, 0):,})"
        )

    def example(self, *, color: bool | None = None) -> str:
        """One row as text, trained tokens in colour or ⟦ ⟧."""
        if self.tokenizer is None or not self.example_ids:
            return ""
        return show_trained(self.tokenizer, self.example_ids, self.example_mask, color=color)

    def __str__(self) -> str:
        lines = [self.summary(), f"formats: {dict(self.formats)}"]
        lines.append("token lengths: " + ", ".join(f"p{p} {n:,}" for p, n in self.lengths.items()))
        for name, words in {**FAULTS, **MENDED}.items():
            if self.counts[name]:
                example = self.examples.get(name, "")
                lines.append(
                    f"{self.counts[name]:>8,}  {words}"
                    + (f" (first: {example})" if example else "")
                )
        shown = self.example()
        if shown:
            lines += ["one row, trained tokens marked:", shown]
        return "\n".join(lines)


def audit(
    dataset: Dataset | IterableDataset | Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = 1024,
    truncation_mode: str = "keep_start",
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    train_header: bool = False,
    dataset_text_field: str = "text",
    formatting_func: Callable[[Mapping[str, Any]], str] | None = None,
    tools: list[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    control_tokens: str = "user",
    max_rows: int | None = None,
    strict: bool = False,
) -> AuditReport:
    """Look at a dataset as training would see it, and count what is wrong.

    Rows of any format: text, conversations, prompt-completion, pairs, unpaired, prompts, token ids.
    A row that cannot be prepared is counted and the audit goes on.

    Args:
        dataset: map-style, streaming, or any iterable of rows.
        tokenizer: a transformers tokenizer.
        max_length: most tokens of a row in training.
        truncation_mode: as in `prepare_sft_dataset`, like all arguments up to ``control_tokens``.
        completion_only_loss: as there.
        assistant_only_loss: as there.
        train_header: as there.
        dataset_text_field: as there.
        formatting_func: as there.
        tools: as there.
        chat_template_kwargs: as there.
        control_tokens: as there.
        max_rows: look at this many rows, spread over the dataset; None: at all, or at the first
            1,000 of a stream.
        strict: raise if anything is wrong.

    Raises:
        AuditError: ``strict`` and a fault was found; carries the report.

    Example:
        >>> report = audit(dataset, tokenizer, assistant_only_loss=True)  # doctest: +SKIP
        >>> print(report.summary())  # doctest: +SKIP
        data audit of 1,000 rows: all well (20,512 of 86,001 tokens trained, longest row 611)
    """
    check_truncation(max_length, truncation_mode)
    features = getattr(dataset, "features", None) or {}
    options = {
        "completion_only_loss": completion_only_loss,
        "assistant_only_loss": assistant_only_loss,
        "train_header": train_header,
        "dataset_text_field": dataset_text_field,
        "formatting_func": formatting_func,
        "tools": tools,
        "chat_template_kwargs": chat_template_kwargs,
        "control_tokens": control_tokens,
        "features": features,
    }
    auditor = _Auditor(tokenizer, max_length, truncation_mode, options)
    if isinstance(dataset, Dataset):
        auditor.report.total_rows = len(dataset)
    for numbers, rows in _batches(dataset, max_rows):
        auditor.look_at(numbers, rows)
    report = auditor.finish()
    if strict and not report.ok:
        raise AuditError(report)
    return report


def _batches(dataset: Any, max_rows: int | None) -> Iterator[tuple[list[int], list[Any]]]:
    """Numbers and rows, in batches."""
    if isinstance(dataset, Dataset):
        count = len(dataset) if max_rows is None else min(max_rows, len(dataset))
        spread = [k * len(dataset) // max(count, 1) for k in range(count)]
        for begin in range(0, count, BATCH):
            numbers = spread[begin : begin + BATCH]
            batch = (
                dataset[numbers[0] : numbers[-1] + 1] if count == len(dataset) else dataset[numbers]
            )
            yield (
                numbers,
                [dict(zip(batch, v, strict=True)) for v in zip(*batch.values(), strict=True)],
            )
        return
    if max_rows is None and isinstance(dataset, IterableDataset):
        max_rows = STREAM_ROWS
    rows = islice(enumerate(dataset), max_rows)
    while batch := list(islice(rows, BATCH)):
        yield [k for k, _ in batch], [row for _, row in batch]


class _Auditor:
    """Counts over batches of rows."""

    def __init__(
        self,
        tokenizer: Any,
        max_length: int | None,
        truncation_mode: str,
        options: Mapping[str, Any],
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = Encoder.of(tokenizer)
        self.max_length = max_length
        self.truncation_mode = truncation_mode
        self.options = options
        self.training = RowTokenizer(tokenizer, **options)
        # The completions of pairs and of unpaired rows are always what is scored, and nothing else.
        scoring = {**options, "completion_only_loss": True, "assistant_only_loss": False}
        self.scoring = RowTokenizer(tokenizer, **{**scoring, "formatting_func": None})
        self.report = AuditReport(tokenizer=tokenizer)
        self.sizes: list[int] = []
        self.first: dict[str, int] = {}

    def count(self, name: str, number: int, seen: str = "", times: int = 1) -> None:
        """Count a fault and keep the first place it was met."""
        if times:
            self.report.counts[name] += times
            if number < self.first.get(name, number + 1):
                self.first[name] = number
                self.report.examples[name] = f"row {number}" + (f": {seen}" if seen else "")

    def look_at(self, numbers: Sequence[int], rows: Sequence[Any]) -> None:
        """Audit a batch of rows."""
        groups: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        for number, raw in zip(numbers, rows, strict=True):
            self.report.rows += 1
            try:
                row, kind = self._kind(raw)
                self._look_at_raw(number, row, kind)
            except Exception as error:
                self.count("unreadable", number, " ".join(str(error).split()))
                continue
            self.report.formats[kind] += 1
            groups.setdefault(kind, []).append((number, row))
        for kind, group in groups.items():
            if kind == "preference":
                self._pairs(group)
            elif kind == "unpaired_preference":
                sides = [(n, completion_row(row, "completion")) for n, row in group]
                for number, sample in self._samples(self.scoring, sides):
                    self._sample(number, sample)
            elif kind == "prompt_only":
                self._prompts(group)
            else:
                for number, sample in self._samples(self.training, group):
                    self._sample(number, sample)

    def _kind(self, raw: Any) -> tuple[dict[str, Any], str]:
        if not isinstance(raw, Mapping):
            raise ValueError(f"the row is {type(raw).__name__}, want columns by name")
        if self.options["formatting_func"] is not None:
            return dict(raw), "language_modeling"
        row = maybe_convert_to_chatml(raw)
        return row, detect_format(row, self.options["dataset_text_field"])

    def _look_at_raw(self, number: int, row: dict[str, Any], kind: str) -> None:
        self.count("filled_nulls", number, times=count_nulls(row, self.options["features"]))
        if kind != "tokenized" and has_empty_text(row, self.options["dataset_text_field"]):
            self.count("empty_text", number)
        for messages, complete in conversations(row):
            fault = role_fault(messages, complete=complete)
            if fault:
                self.count("role_order", number, fault)
                break

    def _samples(
        self, rows_tokenizer: RowTokenizer, group: Sequence[tuple[int, dict[str, Any]]]
    ) -> list[tuple[int, Sample]]:
        """Tokenise rows together, or one by one where one of them cannot be."""
        try:
            samples = rows_tokenizer([row for _, row in group])
            return [(number, s) for (number, _), s in zip(group, samples, strict=True)]
        except RowError:
            made = []
            for number, row in group:
                try:
                    made.append((number, rows_tokenizer([row], number)[0]))
                except RowError as error:
                    self.count("unreadable", number, str(error).removeprefix(f"row {number}: "))
            return made

    def _pairs(self, group: Sequence[tuple[int, dict[str, Any]]]) -> None:
        split = []
        for number, row in group:
            try:
                sides = split_sides(row)
            except ValueError as error:
                self.count("unreadable", number, str(error))
                continue
            if reason := empty_side(sides):
                self.count("equal_pairs" if reason == EQUAL_PAIR else "empty_text", number)
            else:
                split.append((number, sides))
        chosen, rejected = (
            dict(self._samples(self.scoring, [(n, completion_row(r, side)) for n, r in split]))
            for side in ("chosen", "rejected")
        )
        for number, _ in split:
            if number not in chosen or number not in rejected:
                continue
            pair = split_pair(chosen[number], rejected[number])
            _, reason = truncate_pair(pair, self.max_length, self.truncation_mode)
            self.count("equal_pairs", number, times=int(reason == EQUAL_PAIR))
            self.count("equal_after_cut", number, times=int(reason == EQUAL_AFTER_CUT))
            self._sample(number, chosen[number])
            self._sample(number, rejected[number])

    def _prompts(self, group: Sequence[tuple[int, dict[str, Any]]]) -> None:
        for number, row in group:
            try:
                prompt = tokenize_prompt(
                    row,
                    self.tokenizer,
                    tools=self.options["tools"],
                    **(self.options["chat_template_kwargs"] or {}),
                )
            except Exception as error:
                self.count("unreadable", number, " ".join(str(error).split()))
                continue
            self.sizes.append(len(prompt.ids))
            self._keep_example(prompt.ids, [0] * len(prompt.ids))

    def _sample(self, number: int, sample: Sample) -> None:
        ids, mask = truncate(sample.ids, sample.mask, self.max_length, self.truncation_mode)
        trained = sum(mask)
        cut = len(sample.ids) - len(ids)
        self.sizes.append(len(sample.ids))
        self.report.trained_tokens += trained
        if not trained:
            why = "all of them lie past max_length" if any(sample.mask) else ""
            self.count("no_trained_token", number, why)
        if cut:
            self.count("cut", number, f"{len(sample.ids)} tokens")
            self.count("lost_eos", number, times=int(self.truncation_mode == "keep_start"))
        self.count("no_end", number, times=int(sample.no_end))
        self.count("unlocated", number, times=sample.unlocated)
        self.count("doubled_bos", number, times=int(sample.doubled_bos))
        self.count("doubled_eos", number, times=int(has_doubled_eos(self.encoder, sample.ids)))
        if sample.prompt_mismatch:
            self.count("prompt_not_prefix", number, sample.prompt_mismatch)
        self._keep_example(ids, mask)

    def _keep_example(self, ids: list[int], mask: list[int]) -> None:
        if not self.report.example_ids or (any(mask) and not any(self.report.example_mask)):
            self.report.example_ids, self.report.example_mask = ids, mask

    def finish(self) -> AuditReport:
        """The report with its percentiles."""
        self.report.tokens = sum(self.sizes)
        if self.sizes:
            values = np.percentile(self.sizes, PERCENTILES, method="higher")
            self.report.lengths = {p: int(v) for p, v in zip(PERCENTILES, values, strict=True)}
        return self.report
