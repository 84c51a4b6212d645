"""From dataset rows to groups of decoded completions, and what reward functions see of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl_data import tokenize_prompt
from rl_decode import decode_completions
from rl_trainers.online.window import Group
from rl_trainers.rewards import ScoredRewards
from rl_trainers.rollouts import RolloutEngine, SamplingParams


def sample_groups(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, Any]],
    *,
    n: int,
    sampling: SamplingParams,
    seed: int,
    stop_ids: Sequence[int],
    chat_template_kwargs: Mapping[str, Any],
) -> list[Group]:
    """Render each row's prompt, sample it ``n`` times, decode; not yet rewarded."""
    prompts = [tokenize_prompt(row, tokenizer, **chat_template_kwargs) for row in rows]
    rollouts = engine.generate([p.ids for p in prompts], n, sampling, seed=seed)
    groups = []
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        mine = rollouts[i * n : (i + 1) * n]
        completions = decode_completions(
            [rollout.ids for rollout in mine],
            tokenizer,
            stop_ids=stop_ids,
            opened=prompt.opened,
            max_length=sampling.max_new_tokens,
            # A model may have more rows than its tokenizer has tokens, and sample one of them.
            out_of_range="mark",
        )
        groups.append(Group(dict(row), prompt.ids, row["prompt"], mine, completions))
    return groups


def shown_to_rewards(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """What reward functions see: under every name one entry a completion.

    ``completions`` holds text for text prompts and one assistant message for conversations; the
    columns of the rows come under their own names.
    """
    pairs = [(group, c) for group in groups for c in group.completions]
    columns = {
        key: [group.row[key] for group, _ in pairs] for key in groups[0].row if key != "prompt"
    }
    texts = [
        c.text if isinstance(g.prompt, str) else [{"role": "assistant", "content": c.text}]
        for g, c in pairs
    ]
    return columns | {
        "prompts": [group.prompt for group, _ in pairs],
        "completions": texts,
        "completion_ids": [c.ids for _, c in pairs],
        "answers": [c.answer for _, c in pairs],
        "states": [c.state for _, c in pairs],
        "finish_reasons": [c.finish_reason for _, c in pairs],
    }


def set_rewards(groups: Sequence[Group], scored: ScoredRewards, *, train_truncated: bool) -> None:
    """Hand each group its rewards, and say which of its completions are trained."""
    place = 0
    for group in groups:
        end = place + len(group.rollouts)
        group.rewards = scored.total[place:end]
        group.rewards_by_function = scored.by_function[place:end]
        group.trained = [
            not bool(reward.isnan()) and (train_truncated or rollout.finish_reason != "length")
            for reward, rollout in zip(group.rewards, group.rollouts, strict=True)
        ]
        place = end
