"""Running the decoder: plain rows, and a prompt once for all of its completions."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from rl_models.batch import CompletionBatch


def accepts(module: nn.Module, name: str) -> bool:
    """Whether the module's forward names this argument."""
    return name in inspect.signature(type(module).forward).parameters


def completion_states(decoder: nn.Module, batch: CompletionBatch) -> Tensor:
    """The hidden state each completion token is predicted from, `[N, Tc, H]`.

    The first token is predicted by the prompt's last state, and the last token predicts nothing
    that is scored, so completions run one position less than they are wide.
    """
    used, prompt_index = torch.unique(batch.prompt_index, return_inverse=True)
    lengths = batch.prompt_lengths[used]
    width = int(lengths.max())
    prompt_ids = batch.prompt_ids[used][:, batch.prompt_ids.shape[1] - width :]
    mask = _left_padding_mask(lengths, width)
    positions = torch.arange(width, device=lengths.device) - (width - lengths)[:, None]
    cache = DynamicCache(config=decoder.config)
    states = run_decoder(decoder, prompt_ids, mask, positions.clamp(min=0), cache)
    first = states[:, -1][prompt_index][:, None]
    run = int(batch.completion_lengths.max()) - 1
    if run < 1:
        return first
    _widen(cache, prompt_index, len(used))
    positions = lengths[prompt_index][:, None] + torch.arange(run, device=lengths.device)
    if mask is not None:
        mask = torch.cat([mask[prompt_index], mask.new_ones(len(prompt_index), run)], 1)
    ids = batch.completion_ids[:, :run]
    return torch.cat([first, run_decoder(decoder, ids, mask, positions, cache)], 1)


def run_decoder(
    decoder: Any,
    ids: Tensor,
    mask: Tensor | None,
    positions: Tensor,
    cache: DynamicCache | None = None,
) -> Tensor:
    """Last hidden state `[B, T, H]`; arguments the decoder does not know are left out."""
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": cache is not None}
    if mask is not None:
        arguments["attention_mask"] = mask
    if accepts(decoder, "position_ids"):
        arguments["position_ids"] = positions
    if cache is not None:
        # transformers 5.x renames the argument; the new name is used where it is known.
        arguments["cache" if accepts(decoder, "cache") else "past_key_values"] = cache
    return decoder(**arguments)[0]


def _left_padding_mask(lengths: Tensor, width: int) -> Tensor | None:
    """`[P, width]`, or None when nothing is padded: attention then needs no explicit mask."""
    if int(lengths.min()) == width:
        return None
    return (torch.arange(width, device=lengths.device) >= width - lengths[:, None]).long()


def _widen(cache: DynamicCache, index: Tensor, prompts: int) -> None:
    """Give each completion its prompt's keys and values, in the order of `index`, keeping the graph."""
    repeats, rest = divmod(len(index), prompts)
    even = torch.arange(prompts, device=index.device).repeat_interleave(repeats)
    if not rest and torch.equal(index, even):
        cache.batch_repeat_interleave(repeats)
    else:
        # index_select, whose backward is a plain index_add, unlike that of advanced indexing.
        cache.reorder_cache(index)
