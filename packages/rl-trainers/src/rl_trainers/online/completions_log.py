"""The completions of each step as parquet, one file a generated window."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rl_trainers.online.window import Group

COMPLETIONS_FOLDER = "completions"


def write_completions(
    folder: Path,
    groups: Sequence[Group],
    *,
    step: int,
    reward_names: Sequence[str],
    extra: Mapping[str, Sequence[Any]],
    rank: int = 0,
) -> Path:
    """Write one row a completion to ``completions/step-000012.parquet``.

    Columns: step, prompt, completion (raw text), answer, state, finish_reason, tokens,
    token ids, reward, advantage, one column a reward function, and the columns in ``extra``
    (what reward functions passed to ``log_extra``, one value a completion).
    """
    rows = [
        _row(group, i, step=step, reward_names=reward_names)
        for group in groups
        for i in range(len(group.completions))
    ]
    table = pa.Table.from_pylist(rows)
    for name, values in extra.items():
        if len(values) != len(rows):
            raise ValueError(
                f"log_extra({name!r}, ...) got {len(values)} values for {len(rows)} completions"
            )
        table = table.append_column(name, pa.array(list(values)))
    path = folder / COMPLETIONS_FOLDER / f"step-{step:06d}{f'-rank{rank}' if rank else ''}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def _row(group: Group, i: int, *, step: int, reward_names: Sequence[str]) -> dict[str, Any]:
    completion = group.completions[i]
    prompt = group.prompt
    scores = {
        f"reward/{name}": float(group.rewards_by_function[i, column])
        for column, name in enumerate(reward_names)
    }
    return {
        "step": step,
        "prompt": prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False),
        "completion": completion.raw_text,
        "answer": completion.answer,
        "state": completion.state,
        "finish_reason": completion.finish_reason,
        "tokens": len(group.rollouts[i].ids),
        "completion_ids": group.rollouts[i].ids,
        "reward": float(group.rewards[i]),
        "advantage": float(group.advantages[i]),
        **scores,
    }
