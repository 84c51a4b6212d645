"""Log-probs of given tokens under a model: the one place where every trainer gets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_models.batch import CompletionBatch, SequenceBatch, by_length
from rl_models.capabilities import keeps_samples_apart, shared_states
from rl_models.decoder import accepts, run_decoder
from rl_models.heads import (
    Head,
    decoder_of,
    find_head,
    head_logps,
    logits_logps,
    say_once,
    unwrap,
)


class TokenScores(NamedTuple):
    """What `score_tokens` returns, each aligned with the ids that were scored.

    logps: `[B, T]` or `[N, Tc]`, float32, exactly 0 where nothing is scored.
    entropy: same shape, of the whole next-token distribution (at the temperature), or None.
    hidden: `[..., H]` last hidden state that each token was predicted from, 0 where nothing is
        scored, or None. A value head applied to it gives the value of the state before the token.
    """

    logps: Tensor
    entropy: Tensor | None = None
    hidden: Tensor | None = None


def score_tokens(
    model: nn.Module,
    batch: SequenceBatch | CompletionBatch,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    return_hidden: bool = False,
    micro_batch_size: int | None = None,
) -> TokenScores:
    """Score the tokens of a batch, with gradients when they are enabled.

    A row scores the same alone, padded on either side, packed, or in a group that shares its
    prompt. Completions of one prompt compute it once, forward and backward: the prompt runs with a
    cache that keeps its graph, the cache is widened to the completions, and these run on it. The
    head is applied to scored positions only, fused with the log-softmax.

    Args:
        model: a causal language model of transformers, one with PEFT adapters, or a value-head
            wrapper around either.
        batch: plain rows or completions, see there.
        temperature: divides the logits; the one that the tokens were sampled with.
        return_entropy: also return the entropy of each scored position.
        return_hidden: also return the hidden state each scored token was predicted from.
        micro_batch_size: rows to run at once, sorted by length so that little is padded; without
            gradients only (with them every part's graph is kept, and nothing would be saved).

    Raises:
        ValueError: the batch does not fit together (see its class), a temperature that is not above
            0, or a micro_batch_size that is below 1 or comes with gradients.

    Example:
        >>> from rl_models.testing import tiny_model
        >>> model = tiny_model("llama")
        >>> batch = CompletionBatch.from_ids([[1, 2, 3]], [[4, 5], [6]], prompt_index=[0, 0])
        >>> score_tokens(model, batch).logps.shape
        torch.Size([2, 2])
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature={temperature}: log-probs need one above 0 (greedy is 1.0 here)"
        )
    if micro_batch_size is not None and (micro_batch_size < 1 or torch.is_grad_enabled()):
        raise ValueError(
            f"micro_batch_size={micro_batch_size}: wanted 1 or more, under torch.no_grad(); "
            "with gradients every part's graph is kept, so split the batch around backward instead"
        )
    model = unwrap(model)
    head = find_head(model)
    options = {"temperature": temperature, "entropy": return_entropy, "hidden": return_hidden}
    if micro_batch_size is None:
        scores = _score(model, head, batch, **options)
    else:
        chunks = by_length(batch).split(micro_batch_size)
        parts = [_score(model, head, batch.rows(chunk), **options) for chunk in chunks]
        scores = _put_together(parts, chunks, batch)
    if not torch.is_grad_enabled():
        # Casts that autocast made without a graph would cut the gradient of a later forward.
        torch.clear_autocast_cache()
    return scores


def final_states(model: nn.Module, batch: CompletionBatch) -> Tensor:
    """The hidden state after each row's last token, `[N, H]`, the prompts computed once.

    For what judges a whole answer: the head of a reward model, on chosen and rejected completions
    of one prompt.

    Args:
        model: a causal language model or one for sequence classification, or a PEFT model of one.
        batch: completions; an empty one has its prompt's last state.

    Example:
        >>> from rl_models.testing import tiny_model
        >>> pairs = CompletionBatch.from_ids([[1, 2]], [[3, 4], [5]], prompt_index=[0, 0])
        >>> final_states(tiny_model("llama"), pairs).shape
        torch.Size([2, 32])
    """
    inner = unwrap(model)
    decoder = inner.base_model
    rows = torch.arange(len(batch.completion_ids), device=batch.completion_ids.device)
    states = shared_states(inner, decoder, batch, through_last=True) if len(rows) else None
    if states is not None:
        return states[rows, batch.completion_lengths]
    whole = batch.as_sequences()
    steps = torch.arange(whole.input_ids.shape[1], device=rows.device).expand_as(whole.input_ids)
    ids = whole.input_ids.masked_fill(~whole.attended(), 0)
    states = run_decoder(decoder, ids, torch.ones_like(ids), steps)
    return states[rows, whole.attended().sum(-1) - 1]


def _score(
    model: Any, head: Head | None, batch: SequenceBatch | CompletionBatch, **options: Any
) -> TokenScores:
    if not len(batch):
        return _no_scores(model, batch.ids(), **options)
    if isinstance(batch, SequenceBatch):
        return _score_rows(model, head, batch, **options)
    if head is None:
        return _score_as_rows(model, head, batch, **options)
    states = shared_states(model, decoder_of(model, head), batch)
    if states is None:
        return _score_as_rows(model, head, batch, **options)
    return _score_states(model, head, states, batch.completion_ids, batch.scored(), **options)


def _no_scores(model: Any, ids: Tensor, *, entropy: bool, hidden: bool, **_: Any) -> TokenScores:
    """Of a batch without rows: nothing, in the right shapes."""
    zeros = torch.zeros(ids.shape, device=ids.device)
    width = model.config.get_text_config().hidden_size
    states = zeros.new_zeros(*ids.shape, width) if hidden else None
    return TokenScores(zeros, zeros if entropy else None, states)


def _put_together(
    parts: list[TokenScores], chunks: Sequence[Tensor], batch: SequenceBatch | CompletionBatch
) -> TokenScores:
    """The parts' rows in the order and width of the whole batch."""
    shape = batch.ids().shape

    def whole(parts: Sequence[Tensor]) -> Tensor:
        full = parts[0].new_zeros(*shape, *parts[0].shape[2:])
        for chunk, part in zip(chunks, parts, strict=True):
            full[chunk, : part.shape[1]] = part
        return full

    logps, entropies, states = zip(*parts, strict=True)
    return TokenScores(
        whole(logps),
        None if entropies[0] is None else whole(entropies),
        None if states[0] is None else whole(states),
    )


def _changed(scores: TokenScores, change: Callable[[Tensor], Tensor]) -> TokenScores:
    """The same change to each tensor there is."""
    return TokenScores(
        change(scores.logps),
        None if scores.entropy is None else change(scores.entropy),
        None if scores.hidden is None else change(scores.hidden),
    )


def _score_as_rows(
    model: Any, head: Head | None, batch: CompletionBatch, **options: Any
) -> TokenScores:
    """The plain way for completions: prompt and completion in one row each."""
    scores = _score_rows(model, head, batch.as_sequences(), **options)
    steps = torch.arange(batch.completion_ids.shape[1], device=batch.completion_ids.device)
    place = batch.prompt_lengths[batch.prompt_index][:, None] + steps
    rows = torch.arange(len(place), device=place.device)[:, None]
    return _changed(scores, lambda x: x[rows, place])


def _score_rows(model: Any, head: Head | None, batch: SequenceBatch, **options: Any) -> TokenScores:
    """Rows as they are where attention needs no padding mask, else each sample in its own row."""
    packed = batch.is_packed()
    if packed and (head is None or not keeps_samples_apart(model, decoder_of(model, head))):
        say_once(model, "packed samples would see each other; each is computed in a row of its own")
    elif packed or _padded_on_the_right(batch):
        return _score_causal_rows(model, head, batch, **options)
    samples, place = batch.samples()
    scores = _score_causal_rows(model, head, samples, **options)
    attended = batch.attended()
    return _changed(scores, lambda x: _in_place(x[place], attended))


def _padded_on_the_right(batch: SequenceBatch) -> bool:
    if batch.attention_mask is None:
        return True
    attended = batch.attended()
    return not bool((attended[:, 1:] & ~attended[:, :-1]).any())


def _score_causal_rows(
    model: Any, head: Head | None, batch: SequenceBatch, **options: Any
) -> TokenScores:
    """Rows with all padding on the right, or packed ones that attention tells apart.

    Nothing real can see what comes after it, so padding is not masked, and attention takes its
    fastest form. Packed samples are told apart by their positions, each padding being one too.
    """
    ids = batch.input_ids.masked_fill(~batch.attended(), 0)
    packed = batch.is_packed()
    steps = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    positions = batch.positions() * batch.attended() if packed else steps
    targets, scored = batch.input_ids[:, 1:], batch.score_mask[:, 1:]
    if head is None:
        scores = _score_logits(model, ids, positions, targets, scored, **options)
    else:
        mask = None if packed else torch.ones_like(ids)
        states = run_decoder(decoder_of(model, head), ids, mask, positions)
        scores = _score_states(model, head, states[:, :-1], targets, scored, **options)
    return _changed(scores, _one_later)


def _one_later(values: Tensor) -> Tensor:
    """From 'what position t predicts' to 'what token t was predicted by'; token 0 gets 0."""
    return torch.cat([torch.zeros_like(values[:, :1]), values], 1)


def _score_states(
    model: Any,
    head: Head,
    states: Tensor,
    ids: Tensor,
    scored: Tensor,
    *,
    temperature: float,
    entropy: bool,
    hidden: bool,
) -> TokenScores:
    """Apply the head where something is scored and put the results back in place."""
    width = min(states.shape[1], scored.shape[1])
    where = scored[:, :width].nonzero(as_tuple=True)
    picked = states[where]
    logps, entropies = head_logps(
        model, head, picked, ids[where], temperature=temperature, entropy=entropy
    )
    return TokenScores(
        _in_place(logps, scored),
        _in_place(entropies, scored) if entropies is not None else None,
        _in_place(picked, scored) if hidden else None,
    )


def _score_logits(
    model: Any,
    ids: Tensor,
    positions: Tensor,
    targets: Tensor,
    scored: Tensor,
    *,
    temperature: float,
    entropy: bool,
    hidden: bool,
) -> TokenScores:
    """Score from the logits that the model's own forward returns; no position is left out of them.

    `logits_to_keep` is not used, so a model that ignores it or names it otherwise scores the same.
    """
    arguments = {"position_ids": positions} if accepts(model, "position_ids") else {}
    output = model(input_ids=ids, use_cache=False, output_hidden_states=hidden, **arguments)
    where = scored.nonzero(as_tuple=True)
    scores = logits_logps(
        output.logits[where], targets[where], temperature=temperature, entropy=entropy
    )
    return TokenScores(
        _in_place(scores[0], scored),
        _in_place(scores[1], scored) if entropy else None,
        _in_place(output.hidden_states[-1][where], scored) if hidden else None,
    )


def _in_place(values: Tensor, scored: Tensor) -> Tensor:
    """Values of the scored positions in a tensor of zeros of the batch's shape."""
    full = values.new_zeros(*scored.shape, *values.shape[1:])
    full[scored] = values
    return full
