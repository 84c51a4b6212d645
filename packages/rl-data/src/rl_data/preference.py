"""Preference data: pairs and unpaired rows to ids with a shared prompt, cut and counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from datasets import Dataset, DatasetDict, Features, IterableDataset, List, Value

from .encoding import common_prefix_length
from .packing import column_names
from .prompts import maybe_extract_prompt
from .report import CUT_AWAY, EMPTY_SIDE, EQUAL_AFTER_CUT, EQUAL_PAIR, NO_TRAINED, Report
from .rows import Sample
from .tokenization import RowsStep, check_dataset, check_truncation, run_step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def unpair_preference_dataset(
    dataset: Any, num_proc: int | None = None, desc: str | None = None
) -> Any:
    """Turn each pair into two rows with ``completion`` and ``label`` (true for chosen).

    Within each batch of the map all chosen rows come first, then all rejected ones. Other columns
    are repeated. A prompt that is only implied (the sides' shared beginning) is extracted.

    Args:
        dataset: a dataset or a dict of splits, with ``chosen`` and ``rejected``.
        num_proc: processes for map-style datasets.
        desc: text beside the progress bar.

    Example:
        >>> rows = Dataset.from_dict({"prompt": ["2+2="], "chosen": ["4"], "rejected": ["5"]})
        >>> unpair_preference_dataset(rows)[:]
        {'prompt': ['2+2=', '2+2='], 'completion': ['4', '5'], 'label': [True, False]}
    """
    if isinstance(dataset, Mapping):
        return DatasetDict(
            {k: unpair_preference_dataset(v, num_proc, desc) for k, v in dataset.items()}
        )
    names = column_names(dataset)
    options: dict[str, Any] = {"batched": True, "remove_columns": names}
    if isinstance(dataset, Dataset):
        options.update(num_proc=num_proc, desc=desc or "Unpairing")
    return dataset.map(_unpair, **options)


def maybe_unpair_preference_dataset(
    dataset: Any, num_proc: int | None = None, desc: str | None = None
) -> Any:
    """`unpair_preference_dataset` for datasets with both sides, others unchanged."""
    first = next(iter(dataset.values())) if isinstance(dataset, Mapping) else dataset
    if {"chosen", "rejected"} <= set(column_names(first)):
        return unpair_preference_dataset(dataset, num_proc, desc)
    return dataset


def _unpair(batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    rows = [
        maybe_extract_prompt(dict(zip(batch, values, strict=True)))
        for values in zip(*batch.values(), strict=True)
    ]
    kept = [name for name in (rows[0] if rows else {}) if name not in ("chosen", "rejected")]
    if "prompt" in kept:
        kept = ["prompt", *(name for name in kept if name != "prompt")]
    out: dict[str, list[Any]] = {name: [row[name] for row in rows] * 2 for name in kept}
    out["completion"] = [row["chosen"] for row in rows] + [row["rejected"] for row in rows]
    out["label"] = [True] * len(rows) + [False] * len(rows)
    return out


class Pair(NamedTuple):
    """A tokenised pair: prompt ids, and each side's ids after it and which of them are scored."""

    prompt: list[int]
    chosen: list[int]
    chosen_mask: list[int]
    rejected: list[int]
    rejected_mask: list[int]


def split_pair(chosen: Sample, rejected: Sample) -> Pair:
    """Split the shared prompt off both sides: the tokens in common before the first scored one."""
    shared = common_prefix_length(chosen.ids, rejected.ids)
    split = min(shared, _first_scored(chosen), _first_scored(rejected))
    return Pair(
        chosen.ids[:split],
        chosen.ids[split:],
        chosen.mask[split:],
        rejected.ids[split:],
        rejected.mask[split:],
    )


def _first_scored(sample: Sample) -> int:
    return sample.mask.index(1) if 1 in sample.mask else len(sample.mask)


def truncate_pair(
    pair: Pair, max_length: int | None, truncation_mode: str = "keep_start"
) -> tuple[Pair, str]:
    """Cut a pair, no more than needed, so that prompt and side together keep to ``max_length``.

    ``keep_start`` cuts the ends of the completions. ``keep_end`` first cuts the start of the
    prompt, down to one token, and only then the completions.

    Returns:
        The pair, and why it has to be dropped, or "".

    Example:
        >>> pair = Pair([1, 2, 3], [4], [1], [5, 6, 7], [1, 1, 1])
        >>> truncate_pair(pair, 5, "keep_end")[0].prompt
        [2, 3]
    """
    if pair.chosen == pair.rejected:
        return pair, EQUAL_PAIR
    if not any(pair.chosen_mask) or not any(pair.rejected_mask):
        return pair, EMPTY_SIDE if not (pair.chosen and pair.rejected) else NO_TRAINED
    if max_length is None:
        return pair, ""
    prompt = pair.prompt
    longest = max(len(pair.chosen), len(pair.rejected))
    if truncation_mode == "keep_end" and len(prompt) + longest > max_length:
        prompt = prompt[len(prompt) - max(max_length - longest, min(1, len(prompt))) :]
    room = max(max_length - len(prompt), 0)
    cut = Pair(
        prompt,
        pair.chosen[:room],
        pair.chosen_mask[:room],
        pair.rejected[:room],
        pair.rejected_mask[:room],
    )
    if not any(cut.chosen_mask) or not any(cut.rejected_mask):
        return cut, CUT_AWAY
    return cut, EQUAL_AFTER_CUT if cut.chosen == cut.rejected else ""


class _PairStep(RowsStep):
    """A batch of preference rows to columns."""

    lists = ("prompt_ids", "chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask")

    def samples(self, rows: list[dict[str, Any]], first_index: int) -> list[dict[str, Any]]:
        """Tokenise both sides of each row, split, cut and judge them."""
        tokenizer = self.rows_tokenizer()
        split = [tokenizer.guard(split_sides, row, first_index + k) for k, row in enumerate(rows)]
        whole = [k for k, row in enumerate(split) if not empty_side(row)]
        numbers = [first_index + k for k in whole]
        sides = [
            tokenizer.some([completion_row(split[k], side) for k in whole], numbers)
            for side in ("chosen", "rejected")
        ]
        made = dict(zip(whole, map(self._columns, *sides), strict=True))
        nothing = Pair([], [], [], [], [])
        return [
            made.get(k) or {**self._noted(nothing, nothing, empty_side(row)), **notes()}
            for k, row in enumerate(split)
        ]

    def _columns(self, chosen: Sample, rejected: Sample) -> dict[str, Any]:
        pair = split_pair(chosen, rejected)
        cut, reason = truncate_pair(pair, self.max_length, self.truncation_mode)
        return {**self._noted(pair, cut, reason), **notes(chosen, rejected)}

    def _noted(self, pair: Pair, cut: Pair, reason: str) -> dict[str, Any]:
        tokens = sum(len(x) for x in (cut.prompt, cut.chosen, cut.rejected))
        return {
            **dict(zip(self.lists, cut, strict=True)),
            "status": reason,
            "cut": sum(len(x) for x in (pair.prompt, pair.chosen, pair.rejected)) - tokens,
            "tokens": tokens,
            "trained": sum(cut.chosen_mask) + sum(cut.rejected_mask),
        }


class _UnpairedStep(RowsStep):
    """A batch of rows with prompt, completion and label to columns."""

    lists = ("prompt_ids", "completion_ids", "completion_mask")
    scalars = ("label",)

    def samples(self, rows: list[dict[str, Any]], first_index: int) -> list[dict[str, Any]]:
        """Tokenise, split, cut and judge each row."""
        tokenizer = self.rows_tokenizer()
        for k, row in enumerate(rows):
            tokenizer.guard(_check_label, row, first_index + k)
        samples = tokenizer([completion_row(row, "completion") for row in rows], first_index)
        return [
            {**self._columns(sample), "label": bool(row["label"])}
            for sample, row in zip(samples, rows, strict=True)
        ]

    def _columns(self, sample: Sample) -> dict[str, Any]:
        split = _first_scored(sample)
        prompt, ids, mask = sample.ids[:split], sample.ids[split:], sample.mask[split:]
        reason = "" if any(mask) else NO_TRAINED if ids else EMPTY_SIDE
        if not reason and self.max_length is not None:
            if self.truncation_mode == "keep_end" and len(sample.ids) > self.max_length:
                prompt = prompt[
                    len(prompt) - max(self.max_length - len(ids), min(1, len(prompt))) :
                ]
            room = max(self.max_length - len(prompt), 0)
            ids, mask = ids[:room], mask[:room]
            reason = "" if any(mask) else CUT_AWAY
        tokens = len(prompt) + len(ids)
        return {
            "prompt_ids": prompt,
            "completion_ids": ids,
            "completion_mask": mask,
            "status": reason,
            "cut": len(sample.ids) - tokens,
            "tokens": tokens,
            "trained": sum(mask),
            **notes(sample),
        }


def split_sides(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with an explicit prompt.

    Raises:
        ValueError: a side is missing or neither a text nor a list; the message names the column.
    """
    for column in ("chosen", "rejected"):
        if not isinstance(row.get(column), (str, list, tuple)):
            raise ValueError(f"column {column!r} is {row.get(column)!r}, want a text or messages")
    return maybe_extract_prompt(row)


def empty_side(row: Mapping[str, Any]) -> str:
    """Why conversations without messages on a side are dropped, or ""."""
    sides = [row["chosen"], row["rejected"]]
    if all(sides) or any(isinstance(side, str) for side in sides):
        return ""
    return EQUAL_PAIR if sides[0] == sides[1] else EMPTY_SIDE


def _check_label(row: Mapping[str, Any]) -> None:
    if row.get("label") not in (True, False):
        raise ValueError(f"column 'label' is {row.get('label')!r}, want true or false")


def completion_row(row: Mapping[str, Any], side: str) -> dict[str, Any]:
    """The row with one of its sides as its only completion."""
    kept = {k: v for k, v in row.items() if k not in ("chosen", "rejected", "completion", "label")}
    return {**kept, "completion": row.get(side)}


def notes(*samples: Sample) -> dict[str, Any]:
    """What was noticed about the sides of a row."""
    return {
        "no_end": int(any(s.no_end for s in samples)),
        "unlocated": sum(s.unlocated for s in samples),
        "empty_completion": int(any(s.empty_completion for s in samples)),
        "mismatch": next((s.prompt_mismatch for s in samples if s.prompt_mismatch), ""),
    }


def prepare_preference_dataset(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = 1024,
    truncation_mode: str = "keep_start",
    tools: list[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    control_tokens: str = "user",
    num_proc: int | None = None,
) -> tuple[Any, Report]:
    """Tokenise pairs with their shared prompt, for DPO and reward models.

    Rows whose sides are equal, become equal by cutting, or lose every scored token of a side are
    dropped and counted.

    Args:
        dataset: rows with ``chosen`` and ``rejected``, the ``prompt`` explicit or implied; plain or
            conversational.
        tokenizer: a transformers tokenizer.
        max_length: most tokens of a side, prompt included; None for no limit.
        truncation_mode: see `truncate_pair`.
        tools: tools for rows without a ``tools`` column.
        chat_template_kwargs: variables for the template.
        control_tokens: see `ChatRenderer`.
        num_proc: processes for map-style datasets.

    Returns:
        The dataset, with ``prompt_ids``, ``chosen_ids``, ``chosen_mask``, ``rejected_ids`` and
        ``rejected_mask`` (1: scored), and the report.

    Raises:
        ValueError: a bad option, or a map-style dataset of which no pair is left.
        RowError: a row that is no pair.

    Example:
        >>> rows, report = prepare_preference_dataset(pairs, tokenizer)  # doctest: +SKIP
    """
    check_dataset(dataset)
    check_truncation(max_length, truncation_mode)
    options = _options(dataset, tools, chat_template_kwargs, control_tokens)
    step = _PairStep(tokenizer, max_length, truncation_mode, options)
    return run_step(dataset, step, _list_features(step.lists), num_proc)


def prepare_unpaired_dataset(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = 1024,
    truncation_mode: str = "keep_start",
    tools: list[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    control_tokens: str = "user",
    num_proc: int | None = None,
) -> tuple[Any, Report]:
    """Tokenise rows with ``prompt``, ``completion`` and ``label``, for KTO.

    Args and errors are those of `prepare_preference_dataset`; pairs are unpaired first.

    Returns:
        The dataset, with ``prompt_ids``, ``completion_ids``, ``completion_mask`` (1: scored) and
        ``label``, and the report.

    Example:
        >>> rows, report = prepare_unpaired_dataset(judged, tokenizer)  # doctest: +SKIP
    """
    check_dataset(dataset)
    check_truncation(max_length, truncation_mode)
    dataset = maybe_unpair_preference_dataset(dataset, num_proc)
    options = _options(dataset, tools, chat_template_kwargs, control_tokens)
    step = _UnpairedStep(tokenizer, max_length, truncation_mode, options)
    features = _list_features(step.lists)
    features["label"] = Value("bool")
    return run_step(dataset, step, features, num_proc)


def _options(
    dataset: Any, tools: Any, chat_template_kwargs: Any, control_tokens: str
) -> dict[str, Any]:
    return {
        "completion_only_loss": True,
        "tools": tools,
        "chat_template_kwargs": chat_template_kwargs,
        "control_tokens": control_tokens,
        "features": dataset.features,
    }


def _list_features(names: Sequence[str]) -> Features:
    return Features({name: List(Value("int64")) for name in names})
