"""The engine that needs no server: the model being trained, run in this process.

A prompt is prefilled once for its whole group, then its cache is widened; rows that have ended
leave the batch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from rl_models import merged_weights
from rl_ops import selective_log_softmax
from rl_trainers.rollouts.engine import Rollout, SamplingParams
from rl_trainers.rollouts.sampling import row_uniforms, sample_tokens

# Dropping rows copies the cache, so it waits until it pays.
_COMPACT_AT = 0.125


class InProcessEngine:
    """Generate with a ``transformers`` causal model in this process.

    With ``autocast_dtype`` the engine keeps a copy whose linear weights already have that type,
    adapters merged in and everything else staying as it is. Run under autocast this computes what
    the trainer's own autocast forward computes, without casting every weight at every token; the
    weights being trained are read, never changed. Without it the model itself is used and nothing
    is copied.

    Args:
        model: the model being trained.
        stop_ids: ids that end a completion.
        pad_token_id: fills the left of shorter prompts; its value reaches no result.
        autocast_dtype: ``torch.bfloat16`` or ``torch.float16`` for half-precision generation.

    Raises:
        ValueError: no stop id was given, so that every completion would run to the limit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stop_ids: Sequence[int],
        pad_token_id: int = 0,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        if not stop_ids:
            raise ValueError(
                "the engine got no stop ids: the tokenizer and the generation config declare no "
                "end-of-sequence token. Set one of them, or pass stop_ids"
            )
        self.stop_ids = tuple(stop_ids)
        self.pad_token_id = pad_token_id
        self.autocast_dtype = autocast_dtype
        # transformers 5 renames the argument on the way; the new name is used where it is known.
        named = inspect.signature(type(model).forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"
        self._model = model if autocast_dtype is None else _half_linear_copy(model, autocast_dtype)

    def sync_weights(self, model: nn.Module) -> None:
        """Copy the weights of ``model`` into the engine's own copy, if it has one."""
        if self.autocast_dtype is None:
            return
        targets = dict(self._model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, value in merged_weights(model):
                if name in targets:  # the rest are buffers that no step changes
                    targets[name].copy_(value)

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingParams, *, seed: int
    ) -> list[Rollout]:
        """Continue each prompt ``n`` times; see :class:`RolloutEngine`.

        Raises:
            ValueError: there is no prompt, or an empty one, or ``n`` is below 1.
        """
        if n < 1 or not prompts or any(len(prompt) == 0 for prompt in prompts):
            raise ValueError(
                f"generate() got {len(prompts)} prompts, lengths "
                f"{[len(prompt) for prompt in prompts][:8]}, n={n}: it wants at least one prompt, "
                "none of them empty, and n of at least 1"
            )
        was_training = self._model.training
        self._model.eval()
        try:
            with self._autocast():
                return self._decode(prompts, n, sampling, seed)
        finally:
            self._model.train(was_training)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._model.device.type, dtype=self.autocast_dtype)

    def _decode(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingParams, seed: int
    ) -> list[Rollout]:
        rows = len(prompts) * n
        running, logits = self._prefill(prompts, n)
        uniforms = row_uniforms(rows, sampling.max_new_tokens, seed=seed).to(logits.device)
        ids = torch.zeros(rows, sampling.max_new_tokens, dtype=torch.long, device=logits.device)
        logps = torch.zeros(rows, sampling.max_new_tokens, device=logits.device)
        lengths = torch.zeros(rows, dtype=torch.long, device=logits.device)
        stops = torch.tensor(self.stop_ids, device=logits.device)

        for step in range(sampling.max_new_tokens):
            tokens = sample_tokens(logits, uniforms[running.rows, step], sampling)
            live = running.live
            rows_live = running.rows[live]
            ids[rows_live, step] = tokens[live]
            temperature = sampling.temperature or 1.0
            logps[rows_live, step] = selective_log_softmax(logits, tokens, temperature=temperature)[
                live
            ]
            lengths[rows_live] = step + 1
            running.live = live & ~torch.isin(tokens, stops)
            if step + 1 == sampling.max_new_tokens or not running.live.any():
                break
            tokens = running.compact(tokens)
            logits = self._forward_one(running, tokens)
        return _as_rollouts(ids, logps, lengths, n=n, stop_ids=self.stop_ids)

    def _prefill(self, prompts: Sequence[Sequence[int]], n: int) -> tuple[_Running, Tensor]:
        """Run each prompt once; return the state and the logits ``[P * n, V]`` of its group."""
        device = self._model.device
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), self.pad_token_id, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        cache = DynamicCache(config=self._model.config)
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        cache.batch_repeat_interleave(n)
        rows = len(prompts) * n
        running = _Running(
            cache=cache,
            mask=mask.repeat_interleave(n, dim=0),
            position=positions[:, -1].repeat_interleave(n) + 1,
            rows=torch.arange(rows, device=device),
            live=torch.ones(rows, dtype=torch.bool, device=device),
        )
        return running, output.logits[:, -1].repeat_interleave(n, dim=0)

    def _forward_one(self, running: _Running, tokens: Tensor) -> Tensor:
        """Advance each running row by its token; return the next logits ``[B, V]``."""
        running.mask = torch.cat([running.mask, running.mask.new_ones(len(tokens), 1)], dim=1)
        output = self._model(
            input_ids=tokens.unsqueeze(-1),
            attention_mask=running.mask,
            position_ids=running.position.unsqueeze(-1),
            use_cache=True,
            **{self._cache_argument: running.cache},
        )
        running.position = running.position + 1
        return output.logits[:, -1]


@dataclass
class _Running:
    """The rows still in the batch: ``rows`` says which of all rows each one is."""

    cache: DynamicCache
    mask: Tensor
    position: Tensor
    rows: Tensor
    live: Tensor

    def compact(self, tokens: Tensor) -> Tensor:
        """Drop the ended rows once enough of them have gathered; return the tokens kept."""
        ended = len(self.live) - int(self.live.sum())
        if ended < max(1, _COMPACT_AT * len(self.live)):
            return tokens
        keep = self.live.nonzero().squeeze(-1)
        self.cache.batch_select_indices(keep)
        self.mask, self.position = self.mask[keep], self.position[keep]
        self.rows, self.live = self.rows[keep], self.live[keep]
        return tokens[keep]


def _as_rollouts(
    ids: Tensor, logps: Tensor, lengths: Tensor, *, n: int, stop_ids: tuple[int, ...]
) -> list[Rollout]:
    stops = set(stop_ids)
    rollouts = []
    rows = zip(ids.tolist(), logps.tolist(), lengths.tolist(), strict=True)
    for row, (row_ids, row_logps, length) in enumerate(rows):
        reason = "stop" if row_ids[length - 1] in stops else "length"
        rollouts.append(Rollout(row // n, row_ids[:length], row_logps[:length], reason))
    return rollouts


def _half_linear_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Copy ``model``, its linear layers in ``dtype``: the casts of autocast, made once.

    A linear layer that shares its weight with another module (a tied head) gets its own.
    """
    twin: Any = copy.deepcopy(model)
    if hasattr(twin, "merge_and_unload"):
        twin = twin.merge_and_unload()
    for module in twin.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().to(dtype), requires_grad=False)
            if module.bias is not None:
                module.bias = nn.Parameter(module.bias.detach().to(dtype), requires_grad=False)
    return twin.requires_grad_(False)
