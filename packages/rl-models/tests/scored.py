"""What the scoring tests share: the rows, and their log-probs computed the naive way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14], [15, 16, 17, 18]]
COMPLETIONS = [[21, 22, 23], [24], [25, 26], [27, 28, 29, 30, 31], [32, 33], [34, 35, 36]]
# Uneven groups out of order; prompt 2 has no completion.
PROMPT_INDEX = [0, 1, 0, 3, 1, 0]


def naive_logps(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """Log-probs of a completion: one row alone through the model's own forward and log_softmax."""
    ids = torch.tensor([prompt + completion])
    logps = model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)
    picked = logps[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    return picked[-len(completion) :]


def naive_scores(model: Any) -> list[Tensor]:
    """One tensor for each of COMPLETIONS."""
    pairs = zip(PROMPT_INDEX, COMPLETIONS, strict=True)
    return [naive_logps(model, PROMPTS[prompt], completion) for prompt, completion in pairs]


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every weight that gets one; the model's are cleared afterwards."""
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def relative_difference(mine: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Norm of the difference of two gradients over the norm of the second, over all weights."""
    assert set(mine) == set(other)
    difference = sum(float((mine[n].double() - other[n].double()).square().sum()) for n in other)
    return (difference / sum(float(g.double().square().sum()) for g in other.values())) ** 0.5


def whole_rows() -> list[tuple[list[int], int]]:
    """Prompt and completion in one list, and the length of the prompt."""
    pairs = zip(PROMPT_INDEX, COMPLETIONS, strict=True)
    return [(PROMPTS[prompt] + completion, len(PROMPTS[prompt])) for prompt, completion in pairs]
