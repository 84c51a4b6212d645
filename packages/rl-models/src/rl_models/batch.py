"""The two layouts in which tokens are scored: plain rows, and completions that share prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceBatch:
    """Rows of tokens, padded on either side or packed, and which of their tokens to score.

    Args:
        input_ids: `[B, T]` token ids.
        score_mask: `[B, T]`, True where `log p(token | earlier tokens of its sample)` is wanted.
        attention_mask: `[B, T]`, 0 at padding; None when no position is padding.
        position_ids: `[B, T]`, the place of each token in its own sample, starting at 0. A row
            whose positions start again at 0 holds several packed samples, which do not see each
            other. None: counted from the attention mask, one sample a row.

    Raises:
        ValueError: shapes differ, a padded position is to be scored, or the first token of a sample
            is (nothing comes before it to predict it from).

    Example:
        >>> ids = torch.tensor([[5, 6, 7]])
        >>> SequenceBatch(ids, torch.tensor([[False, True, True]])).positions().tolist()
        [[0, 1, 2]]
    """

    input_ids: Tensor
    score_mask: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("score_mask", "attention_mask", "position_ids"):
            value = getattr(self, name)
            if value is not None and value.shape != self.input_ids.shape:
                raise ValueError(
                    f"{name} has shape {list(value.shape)}, "
                    f"input_ids {list(self.input_ids.shape)}; give all of them one [B, T]"
                )
        scored = self.score_mask.bool()
        object.__setattr__(self, "score_mask", scored)
        if self.attention_mask is not None and bool((scored & ~self.attention_mask.bool()).any()):
            raise ValueError(
                "score_mask marks a padded position; set it to 0 where attention_mask is 0"
            )
        if bool((scored & (self.positions() == 0)).any()):
            raise ValueError(
                "score_mask marks the first token of a sample, which nothing predicts; "
                "set it to 0 there"
            )

    def positions(self) -> Tensor:
        """Positions `[B, T]`: those given, or counted over the attended tokens of each row."""
        if self.position_ids is not None:
            return self.position_ids
        if self.attention_mask is None:
            steps = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
            return steps.expand_as(self.input_ids)
        return (self.attention_mask.long().cumsum(-1) - 1).clamp(min=0)

    def is_packed(self) -> bool:
        """Whether a row holds more than one sample."""
        if self.position_ids is None:
            return False
        starts = self.position_ids == 0
        if self.attention_mask is not None:
            starts = starts & self.attention_mask.bool()
        return bool((starts.sum(-1) > 1).any())

    def __len__(self) -> int:
        return len(self.input_ids)

    def ids(self) -> Tensor:
        """The ids that log-probs are aligned with, `[B, T]`."""
        return self.input_ids

    def attended(self) -> Tensor:
        """`[B, T]` True where a real token stands."""
        if self.attention_mask is None:
            return torch.ones_like(self.input_ids, dtype=torch.bool)
        return self.attention_mask.bool()

    def rows(self, index: Tensor) -> SequenceBatch:
        """The rows `index` as a batch of their own, without columns that are padding in all."""
        used = self.attended()[index].any(0).nonzero()
        width = int(used.max()) + 1 if len(used) else 0
        columns = (self.input_ids, self.score_mask, self.attention_mask, self.position_ids)
        return SequenceBatch(*(None if x is None else x[index, :width] for x in columns))  # type: ignore[arg-type]

    def samples(self) -> tuple[SequenceBatch, tuple[Tensor, Tensor]]:
        """Every sample in a row of its own, padded on the right, and where each token went.

        The second value is the pair (row, place) `[M]` of each attended token, in the order of
        `attended()`: the samples' values go back by `full[attended] = values[pair]`.
        """
        attended = self.attended()
        positions = self.positions()[attended]
        row = torch.arange(len(self.input_ids), device=positions.device)[:, None]
        row = row.expand_as(self.input_ids)[attended]
        starts = (positions == 0) | (row != row.roll(1))
        sample = starts.cumsum(0) - 1
        size = (int(sample.max()) + 1, int(positions.max()) + 1) if len(positions) else (0, 0)
        place = (sample, positions)
        split = [self.input_ids, self.score_mask, attended]
        ids, scored, real = (
            value.new_zeros(size).index_put(place, value[attended]) for value in split
        )
        return SequenceBatch(ids, scored, real.long()), place


@dataclass(frozen=True)
class CompletionBatch:
    """Completions of prompts, several completions to a prompt; each prompt is computed once.

    Args:
        prompt_ids: `[P, Tp]`, padded on the LEFT.
        prompt_lengths: `[P]` real tokens of each prompt.
        completion_ids: `[N, Tc]`, padded on the RIGHT.
        completion_lengths: `[N]` real tokens of each completion, 0 allowed.
        prompt_index: `[N]`, which prompt each completion continues. Groups may be uneven, in any
            order, and a prompt may have none (it is then not computed).
        score_mask: `[N, Tc]`, True where a log-prob is wanted; None: all real tokens.

    Raises:
        ValueError: shapes that do not fit, an index or a length out of range, a completion of an
            empty prompt (nothing predicts its first token), or a padded token that is to be scored.

    Example:
        >>> batch = CompletionBatch.from_ids([[1, 2, 3], [4]], [[5, 6], [7]], prompt_index=[0, 1])
        >>> batch.prompt_ids.tolist(), batch.completion_ids.tolist()
        ([[1, 2, 3], [0, 0, 4]], [[5, 6], [7, 0]])
    """

    prompt_ids: Tensor
    prompt_lengths: Tensor
    completion_ids: Tensor
    completion_lengths: Tensor
    prompt_index: Tensor
    score_mask: Tensor | None = None

    def __post_init__(self) -> None:
        prompts, rows = len(self.prompt_ids), len(self.completion_ids)
        for name, count in (
            ("prompt_lengths", prompts),
            ("completion_lengths", rows),
            ("prompt_index", rows),
        ):
            shape = list(getattr(self, name).shape)
            if shape != [count]:
                raise ValueError(f"{name} has shape {shape}, wanted [{count}], one value a row")
        if self.score_mask is not None and self.score_mask.shape != self.completion_ids.shape:
            raise ValueError(
                f"score_mask has shape {list(self.score_mask.shape)}, "
                f"completion_ids {list(self.completion_ids.shape)}; give both one [N, Tc]"
            )
        self._check_values()

    def _check_values(self) -> None:
        if not len(self.completion_ids):
            return
        index = self.prompt_index
        if int(index.min()) < 0 or int(index.max()) >= len(self.prompt_ids):
            raise ValueError(
                f"prompt_index runs from {int(index.min())} to {int(index.max())}, "
                f"but there are {len(self.prompt_ids)} prompts"
            )
        for name, ids in (("prompt", self.prompt_ids), ("completion", self.completion_ids)):
            lengths = getattr(self, f"{name}_lengths")
            if int(lengths.min()) < 0 or int(lengths.max()) > ids.shape[1]:
                raise ValueError(
                    f"{name}_lengths runs from {int(lengths.min())} to {int(lengths.max())}, "
                    f"but {name}_ids is {ids.shape[1]} wide"
                )
        if bool((self.prompt_lengths[index] < 1).any()):
            raise ValueError(
                "a completion continues an empty prompt, so nothing predicts its first token; "
                "put the BOS token (or any token) into the prompt"
            )
        if self.score_mask is not None and bool((self.score_mask.bool() & ~self.real()).any()):
            raise ValueError("score_mask marks a token past completion_lengths; set it to 0 there")

    @classmethod
    def from_ids(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        prompt_index: Sequence[int] | Tensor,
        *,
        score_mask: Sequence[Sequence[int]] | None = None,
        pad_token_id: int = 0,
        device: torch.device | str | None = None,
    ) -> CompletionBatch:
        """A batch from lists of ids; `pad_token_id` may be a real token too, it is never read."""
        completion_ids, completion_lengths = _padded(completions, pad_token_id, left=False)
        prompt_ids, prompt_lengths = _padded(prompts, pad_token_id, left=True)
        mask = None if score_mask is None else _padded(score_mask, 0, left=False)[0].bool()
        return cls(
            prompt_ids,
            prompt_lengths,
            completion_ids,
            completion_lengths,
            torch.as_tensor(prompt_index, dtype=torch.long),
            mask,
        ).to(device)

    def to(self, device: torch.device | str | None) -> CompletionBatch:
        """The batch on another device (None: as it is)."""
        if device is None:
            return self
        return replace(
            self,
            **{name: value.to(device) for name, value in vars(self).items() if value is not None},
        )

    def __len__(self) -> int:
        return len(self.completion_ids)

    def ids(self) -> Tensor:
        """The ids that log-probs are aligned with, `[N, Tc]`."""
        return self.completion_ids

    def real(self) -> Tensor:
        """`[N, Tc]` True at the real tokens of the completions."""
        steps = torch.arange(self.completion_ids.shape[1], device=self.completion_ids.device)
        return steps < self.completion_lengths[:, None]

    def scored(self) -> Tensor:
        """`[N, Tc]` True at the tokens to score."""
        return self.real() if self.score_mask is None else self.score_mask.bool()

    def rows(self, index: Tensor) -> CompletionBatch:
        """The completions `index` with the prompts they continue, cut to their lengths."""
        used, prompt_index = torch.unique(self.prompt_index[index], return_inverse=True)
        prompt_lengths, lengths = self.prompt_lengths[used], self.completion_lengths[index]
        prompt_width = int(prompt_lengths.max()) if len(used) else 0
        width = int(lengths.max()) if len(index) else 0
        return CompletionBatch(
            self.prompt_ids[used][:, self.prompt_ids.shape[1] - prompt_width :],
            prompt_lengths,
            self.completion_ids[index][:, :width],
            lengths,
            prompt_index,
            None if self.score_mask is None else self.score_mask[index][:, :width],
        )

    def as_sequences(self) -> SequenceBatch:
        """The same completions as plain rows, prompt and completion in one, padded on the right.

        Completion token `t` of row `n` stands at `prompt_lengths[prompt_index[n]] + t`.
        """
        ids = torch.cat([self.prompt_ids[self.prompt_index], self.completion_ids], 1)
        prompt_lengths = self.prompt_lengths[self.prompt_index][:, None]
        padding = self.prompt_ids.shape[1] - prompt_lengths
        lengths = prompt_lengths + self.completion_lengths[:, None]
        steps = torch.arange(ids.shape[1], device=ids.device)
        source = (steps + padding).clamp(max=ids.shape[1] - 1)
        blank = torch.zeros_like(self.prompt_ids[self.prompt_index], dtype=torch.bool)
        scored = torch.cat([blank, self.scored()], 1).gather(1, source)
        attended = steps < lengths
        return SequenceBatch(ids.gather(1, source), scored & attended, attended.long())


def by_length(batch: SequenceBatch | CompletionBatch) -> Tensor:
    """The rows' order by length; completions of one prompt stay side by side."""
    if isinstance(batch, SequenceBatch):
        return batch.attended().sum(-1).argsort(stable=True)
    order = batch.completion_lengths.argsort(stable=True)
    order = order[batch.prompt_index[order].argsort(stable=True)]
    return order[batch.prompt_lengths[batch.prompt_index[order]].argsort(stable=True)]


def _padded(rows: Sequence[Sequence[int]], value: int, *, left: bool) -> tuple[Tensor, Tensor]:
    width = max((len(row) for row in rows), default=0)
    padded = torch.full((len(rows), width), value, dtype=torch.long)
    for place, row in enumerate(rows):
        start = width - len(row) if left else 0
        padded[place, start : start + len(row)] = torch.as_tensor(row, dtype=torch.long)
    return padded, torch.tensor([len(row) for row in rows], dtype=torch.long)
