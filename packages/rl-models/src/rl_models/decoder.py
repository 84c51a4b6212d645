"""Running the decoder: plain rows, and a prompt once for all of its completions."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

from rl_models.batch import CompletionBatch

_SMALL_ATTENTION = 2**17  # query-key pairs a head


def accepts(module: nn.Module, name: str) -> bool:
    """Whether the module's forward names this argument."""
    return name in inspect.signature(type(module).forward).parameters


def completion_states(
    decoder: Any, batch: CompletionBatch, *, through_last: bool = False
) -> Tensor:
    """The hidden state each completion token is predicted from, `[N, Tc, H]`.

    The first token is predicted by the prompt's last state, and the last token predicts nothing
    that is scored, so completions run one position less than the longest of them. `through_last`
    runs that too and returns `[N, Tc + 1, H]`: at `t` the state after `t` tokens.
    """
    used, prompt_index = torch.unique(batch.prompt_index, return_inverse=True)
    lengths = batch.prompt_lengths[used]
    width = int(lengths.max())
    prompt_ids = batch.prompt_ids[used][:, batch.prompt_ids.shape[1] - width :]
    # Padding stands on the left, so that the distance of two tokens is that of their places.
    positions = torch.arange(width, device=lengths.device) - (width - lengths)[:, None]
    mask = (positions >= 0).long()
    cache = DynamicCache(config=decoder.config)
    prompt_ids = prompt_ids.masked_fill(positions < 0, 0)
    states = run_decoder(decoder, prompt_ids, mask, positions.clamp(min=0), cache)
    first = states[:, -1][prompt_index][:, None]
    run = int(batch.completion_lengths.max()) - int(not through_last)
    if run < 1:
        return first
    _widen(cache, prompt_index, len(used))
    steps = torch.arange(run, device=lengths.device)
    ids = batch.completion_ids[:, :run].masked_fill(steps >= batch.completion_lengths[:, None], 0)
    mask = torch.cat([mask[prompt_index], torch.ones_like(ids)], 1)
    positions = lengths[prompt_index][:, None] + steps
    return torch.cat([first, run_decoder(decoder, ids, mask, positions, cache)], 1)


def block_states(decoder: Any, batch: CompletionBatch, *, through_last: bool = False) -> Tensor:
    """`completion_states` without a cache: a prompt and its completions side by side in one row.

    The mask lets each completion see its prompt and itself. For gradient checkpointing, where a
    layer that is run again would find its own keys in the cache.
    """
    used, prompt_index = torch.unique(batch.prompt_index, return_inverse=True)
    prompts = batch.prompt_lengths[used]
    lengths = (batch.completion_lengths - int(not through_last)).clamp(min=0)
    start = _starts(prompts, lengths, prompt_index)
    width = int((start + lengths).max())
    columns = torch.arange(width, device=start.device)
    # 0 in the prompt, n + 1 in completion n, -1 at padding.
    owner = torch.where(columns < prompts[:, None], 0, -1)
    positions = columns.expand_as(owner).clone()
    source = (columns + batch.prompt_ids.shape[1] - prompts[:, None]).clamp(
        max=batch.prompt_ids.shape[1] - 1
    )
    ids = batch.prompt_ids[used].gather(1, source).masked_fill(owner < 0, 0)
    steps = torch.arange(int(lengths.max()), device=start.device)
    rows, place = (steps < lengths[:, None]).nonzero(as_tuple=True)
    target = prompt_index[rows], start[rows] + place
    ids = ids.index_put(target, batch.completion_ids[rows, place])
    owner = owner.index_put(target, rows + 1)
    positions = positions.index_put(target, prompts[prompt_index[rows]] + place)
    seen = (owner[:, None] == 0) | (owner[:, None] == owner[:, :, None])
    seen &= columns <= columns[:, None]
    states = run_decoder(decoder, ids, seen[:, None], positions)
    wanted = torch.arange(steps.shape[0] + 1, device=start.device)
    column = torch.where(
        wanted == 0, prompts[prompt_index][:, None] - 1, start[:, None] + wanted - 1
    )
    return states[prompt_index[:, None], column.clamp(max=width - 1)]


def _starts(prompts: Tensor, lengths: Tensor, prompt_index: Tensor) -> Tensor:
    """The column in its prompt's row at which each completion starts, `[N]`."""
    order = prompt_index.argsort(stable=True)
    before = lengths[order].cumsum(0) - lengths[order]
    first = torch.searchsorted(prompt_index[order], torch.arange(len(prompts), device=order.device))
    within = before - before[first][prompt_index[order]]
    return torch.empty_like(within).index_put((order,), within) + prompts[prompt_index]


def run_decoder(
    decoder: Any,
    ids: Tensor,
    mask: Tensor | None,
    positions: Tensor,
    cache: DynamicCache | None = None,
) -> Tensor:
    """Last hidden state `[B, T, H]` of `ids` `[B, T]`; arguments it does not know are left out.

    `mask` covers what is in the cache too; `[B, 1, T, T]` says who sees whom; None lets attention
    tell packed samples apart by their positions.
    """
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": cache is not None}
    if mask is not None:
        arguments["attention_mask"] = mask
    if accepts(decoder, "position_ids"):
        arguments["position_ids"] = positions
    if cache is not None:
        # transformers 5.x renames the argument; the new name is used where it is known.
        arguments["cache" if accepts(decoder, "cache") else "past_key_values"] = cache
    with _attention_kernel(ids, ids.shape[1] if mask is None else mask.shape[-1]):
        return decoder(**arguments)[0]


def _attention_kernel(ids: Tensor, keys: int) -> AbstractContextManager[Any]:
    """Plain attention for small half-precision blocks on the CPU.

    There the backward of the flash kernel takes twice the time of plain matrix products (64 rows of
    11 tokens on 51: 32 ms against 15 ms a layer). Large blocks keep it, for its memory.
    """
    small = ids.numel() * keys <= _SMALL_ATTENTION
    if small and ids.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()


def _widen(cache: DynamicCache, index: Tensor, prompts: int) -> None:
    """Give each completion its prompt's keys and values, in the order of `index`, with graph."""
    repeats, rest = divmod(len(index), prompts)
    even = torch.arange(prompts, device=index.device).repeat_interleave(repeats)
    recurrent = any(hasattr(layer, "update_recurrent_state") for layer in cache.layers)
    if recurrent or rest or not torch.equal(index, even):
        # index_select, whose backward is a plain index_add, unlike that of advanced indexing.
        cache.reorder_cache(index)  # type: ignore[arg-type]
    else:
        cache.batch_repeat_interleave(repeats)
