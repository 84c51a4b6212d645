"""Rows of token ids to padded tensors; masks come from lengths, never from the value of a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_ops import pad


class SFTCollator:
    """Right-pads samples or packs for supervised training.

    The result holds ``input_ids``, ``attention_mask``, ``position_ids`` and ``loss_mask``, all
    int64 ``[B, T]``. ``attention_mask`` is 1 on real tokens, whatever their id (pad may equal EOS).
    ``position_ids`` count from 0 in each packed sample, and go on counting through the padding.
    ``loss_mask`` is 0 on padding and on the first token of every sample, which nothing before it
    predicts.

    Args:
        pad_token_id: what padding is filled with.
        pad_to_multiple_of: round ``T`` up to a multiple of this.

    Example:
        >>> rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
        >>> SFTCollator(0)(rows)["attention_mask"].tolist()
        [[1, 1, 1], [1, 1, 0]]
    """

    def __init__(self, pad_token_id: int, pad_to_multiple_of: int | None = None) -> None:
        self.pad_token_id = pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate a batch of rows."""
        ids = [torch.as_tensor(row["input_ids"], dtype=torch.long) for row in rows]
        input_ids = self._pad(ids, self.pad_token_id)
        attention_mask = self._pad([torch.ones_like(row) for row in ids], 0)
        # Going on counting keeps the padding from looking like further packed samples.
        position_ids = self._pad([_positions(row) for row in rows], -1)
        ends = position_ids.gather(1, attention_mask.sum(1, keepdim=True).sub(1).clamp(min=0))
        counted = ends + (1 - attention_mask).cumsum(1)
        position_ids = torch.where(attention_mask.bool(), position_ids, counted)
        loss_mask = self._pad([_loss_mask(row) for row in rows], 0)
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "loss_mask": loss_mask.masked_fill(position_ids == 0, 0),
        }

    def _pad(self, rows: Sequence[Tensor], value: int) -> Tensor:
        return pad(rows, value, pad_to_multiple_of=self.pad_to_multiple_of)


def _positions(row: Mapping[str, Any]) -> Tensor:
    positions = row.get("position_ids")
    if positions is None:
        return torch.arange(len(row["input_ids"]))
    return torch.as_tensor(_one_each(row, "position_ids"), dtype=torch.long)


def _loss_mask(row: Mapping[str, Any]) -> Tensor:
    """The row's own mask, or the one its labels imply, or every token."""
    if row.get("loss_mask") is not None:
        return torch.as_tensor(_one_each(row, "loss_mask"), dtype=torch.long)
    if row.get("labels") is not None:
        return (torch.as_tensor(_one_each(row, "labels")) != -100).long()
    return torch.ones(len(row["input_ids"]), dtype=torch.long)


def _one_each(row: Mapping[str, Any], name: str) -> Any:
    count, wanted = len(row[name]), len(row["input_ids"])
    if count != wanted:
        raise ValueError(f"{name} has {count} entries for {wanted} input_ids: want one each")
    return row[name]


class PreferenceCollator:
    """Pads pairs for DPO and reward models: first all chosen rows, then all rejected ones.

    The result holds ``input_ids``, ``attention_mask``, ``position_ids`` and ``loss_mask`` (1:
    scored), all int64 ``[2B, T]`` and right-padded, and ``prompt_lengths`` ``[2B]``.

    Args:
        pad_token_id: what padding is filled with.
        pad_to_multiple_of: round ``T`` up to a multiple of this.

    Example:
        >>> row = {"prompt_ids": [1], "chosen_ids": [2, 3], "chosen_mask": [1, 1],
        ...        "rejected_ids": [4], "rejected_mask": [1]}
        >>> PreferenceCollator(0)([row])["input_ids"].tolist()
        [[1, 2, 3], [1, 4, 0]]
    """

    def __init__(self, pad_token_id: int, pad_to_multiple_of: int | None = None) -> None:
        self.collate = SFTCollator(pad_token_id, pad_to_multiple_of)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate a batch of rows."""
        sides = [(row, side) for side in ("chosen", "rejected") for row in rows]
        return _collate_completions(
            self.collate,
            [(row["prompt_ids"], row[f"{side}_ids"], row[f"{side}_mask"]) for row, side in sides],
        )


class UnpairedCollator:
    """Pads rows for KTO.

    The result holds what `PreferenceCollator` gives, ``[B, T]``, and ``labels``, bool ``[B]``. With
    ``mismatched`` it also holds the same under ``kl_`` names for each prompt with the completion of
    the next row, from which KTO estimates its reference point (Ethayarajh et al., 2024, section
    4.1); that takes a batch of two rows or more.

    Args:
        pad_token_id: what padding is filled with.
        pad_to_multiple_of: round ``T`` up to a multiple of this.
        mismatched: add the mismatched pairs.

    Raises:
        ValueError: ``mismatched`` with a batch of one row, whose completion matches its prompt.
    """

    def __init__(
        self,
        pad_token_id: int,
        pad_to_multiple_of: int | None = None,
        *,
        mismatched: bool = False,
    ) -> None:
        self.collate = SFTCollator(pad_token_id, pad_to_multiple_of)
        self.mismatched = mismatched

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate a batch of rows."""
        parts = [(r["prompt_ids"], r["completion_ids"], r["completion_mask"]) for r in rows]
        out = _collate_completions(self.collate, parts)
        out["labels"] = torch.tensor([bool(r["label"]) for r in rows])
        if self.mismatched:
            if len(rows) < 2:
                raise ValueError(
                    "mismatched=True wants at least 2 rows in a batch, seen 1: raise the batch size"
                )
            turned = [(p, *parts[(k + 1) % len(parts)][1:]) for k, (p, _, _) in enumerate(parts)]
            out.update(
                {f"kl_{k}": v for k, v in _collate_completions(self.collate, turned).items()}
            )
        return out


def _collate_completions(
    collate: SFTCollator, parts: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]
) -> dict[str, Tensor]:
    out = collate(
        [
            {"input_ids": [*prompt, *ids], "loss_mask": [*[0] * len(prompt), *mask]}
            for prompt, ids, mask in parts
        ]
    )
    out["prompt_lengths"] = torch.tensor([len(prompt) for prompt, _, _ in parts])
    return out
