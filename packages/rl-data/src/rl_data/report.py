"""What the preparation of a dataset did: nothing is cut or dropped without a number here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CUT_AWAY = "every trained token lies past max_length"
NO_TRAINED = "no trained token"
EMPTY = "no token"
EQUAL_PAIR = "chosen and rejected are equal"
EQUAL_AFTER_CUT = "chosen and rejected differ only past max_length"
EMPTY_SIDE = "a completion without tokens"
REASONS = (CUT_AWAY, NO_TRAINED, EMPTY, EQUAL_PAIR, EQUAL_AFTER_CUT, EMPTY_SIDE)


@dataclass
class Report:
    """Counts of a preparation; for a streaming dataset they grow while it is read.

    Attributes:
        rows: rows read.
        kept: rows that came out, before packing.
        dropped: rows left out, by reason.
        cut_rows: rows shortened to the limit.
        cut_tokens: tokens that this cost.
        tokens: tokens that came out.
        trained_tokens: those with ``loss_mask`` 1.
        prompt_not_prefix: rows whose prompt's ids are not how the ids of prompt and completion
            begin.
        prompt_not_prefix_example: the first such row, with the tokens that differ.
        no_end: conversations whose rendering ends in no special token, so that nothing teaches the
            model to stop.
        unlocated_turns: assistant's turns that were not found in the rendering and are not trained.
        empty_completions: rows whose completion is empty, so that they train the end alone.
        packs: packed rows, 0 without packing.
        pack_length: length that packs may have.
    """

    rows: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    cut_rows: int = 0
    cut_tokens: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    prompt_not_prefix: int = 0
    prompt_not_prefix_example: str = ""
    no_end: int = 0
    unlocated_turns: int = 0
    empty_completions: int = 0
    packs: int = 0
    pack_length: int = 0

    @property
    def dropped_rows(self) -> int:
        """Rows left out, for whatever reason."""
        return sum(self.dropped.values())

    @property
    def fill(self) -> float:
        """Share of the packs' places that hold a token; 0.0 without packing."""
        places = self.packs * self.pack_length
        return self.tokens / places if places else 0.0

    def drop(self, reason: str, count: int = 1) -> None:
        """Count rows left out."""
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    def as_dict(self) -> Mapping[str, object]:
        """All counts by name, for a log or a file."""
        return {**vars(self), "dropped": dict(self.dropped), "fill": self.fill}

    def __str__(self) -> str:
        lines = [
            f"{self.kept:,} of {self.rows:,} rows kept, {self.tokens:,} tokens, "
            f"{self.trained_tokens:,} trained"
        ]
        lines += [f"dropped {count:,}: {reason}" for reason, count in sorted(self.dropped.items())]
        if self.cut_rows:
            lines.append(f"cut {self.cut_rows:,} rows by {self.cut_tokens:,} tokens")
        if self.packs:
            lines.append(
                f"packed into {self.packs:,} rows of {self.pack_length:,}, {self.fill:.1%} full"
            )
        if self.prompt_not_prefix:
            lines.append(
                f"{self.prompt_not_prefix:,} rows whose prompt is not how prompt + completion "
                "begins; "
                f"first: {self.prompt_not_prefix_example}"
            )
        if self.no_end:
            lines.append(
                f"{self.no_end:,} conversations end in no special token: nothing teaches the model "
                "to stop"
            )
        if self.unlocated_turns:
            lines.append(
                f"{self.unlocated_turns:,} assistant's turns not found in the rendering: not "
                "trained"
            )
        if self.empty_completions:
            lines.append(
                f"{self.empty_completions:,} rows with an empty completion train the end alone"
            )
        return "\n".join(lines)
