"""``rl-train check``: the data audit, on as many rows as there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rl_data import audit
from rl_models import load_tokenizer
from rl_trainers.cli.options import load_rows, parse


@dataclass
class CheckOptions:
    """How the rows will be prepared in training, and how many of them to look at."""

    max_length: int | None = field(default=1024, metadata={"help": "Most tokens of a row."})
    completion_only_loss: bool | None = field(
        default=None, metadata={"help": "Train the completion alone; None: where rows have one."}
    )
    assistant_only_loss: bool = field(
        default=False, metadata={"help": "Train the assistant's turns alone."}
    )
    dataset_text_field: str = field(default="text", metadata={"help": "Column of plain text."})
    max_rows: int | None = field(default=None, metadata={"help": "Look at so many rows; all."})
    strict: bool = field(default=False, metadata={"help": "Exit with an error on any fault."})


def run(arguments: Sequence[str]) -> None:
    """Print the report.

    Raises:
        ValueError: ``--strict`` was given and something is wrong.
    """
    options, check = parse("check", CheckOptions, arguments)
    rows, _ = load_rows(options)
    report = audit(
        rows,
        load_tokenizer(options.model),
        max_length=check.max_length,
        completion_only_loss=check.completion_only_loss,
        assistant_only_loss=check.assistant_only_loss,
        dataset_text_field=check.dataset_text_field,
        max_rows=check.max_rows,
    )
    print(report)
    if check.strict and not report.ok:
        raise ValueError(report.summary())
