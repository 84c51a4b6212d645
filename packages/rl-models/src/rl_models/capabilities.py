"""What a model can do, found out by trying it once on a few tokens rather than from a list of names."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rl_models.batch import CompletionBatch
from rl_models.decoder import accepts, completion_states, run_decoder
from rl_models.heads import Head, decoder_of, short_probe, vocabulary, working_dtype

_shares: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_packs: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

# Rotary scalings whose frequencies depend on the longest row seen, so a prompt's keys would differ.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


def why_not_shared(model: Any, head: Head | None) -> str | None:
    """Why this model cannot continue from a prompt's cache with gradients, or None when it can."""
    if head is None:
        return "its head was not recognised"
    if model.training and _recomputes(model):
        return "gradient checkpointing forbids a cache"
    if model not in _shares:
        _shares[model] = _try_sharing(model, decoder_of(model, head))
    return _shares[model] or None


def keeps_samples_apart(model: Any, head: Head | None) -> bool:
    """Whether packed samples, told apart by their positions alone, do not see each other."""
    if head is None:
        return False
    if model not in _packs:
        _packs[model] = _try_packing(model, decoder_of(model, head))
    return _packs[model]


def _try_sharing(model: Any, decoder: nn.Module) -> str:
    """The reason why sharing fails, "" when two prompts' completions come out as in plain rows."""
    scaling = getattr(model.config, "rope_parameters", None) or {}
    if scaling.get("rope_type") in _LENGTH_DEPENDENT:
        return f"its {scaling['rope_type']} rotary scaling depends on the length of the row"
    ids = [token % vocabulary(model) for token in range(1, 12)]
    prompts, completions = [ids[:3], ids[3:5]], [ids[5:8], ids[8:10], ids[10:11]]
    batch = CompletionBatch.from_ids(prompts, completions, [0, 1, 1]).to(_device(model))
    with short_probe(model, exact=True):
        rows = batch.as_sequences()
        plain = run_decoder(decoder, rows.input_ids, None, rows.positions())
        try:
            shared = completion_states(decoder, batch)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            first = (str(error).splitlines() or [""])[0]
            return f"it cannot continue from a prompt's cache ({type(error).__name__}: {first})"
        place = batch.prompt_lengths[batch.prompt_index] - 1
        wanted = plain[torch.arange(3)[:, None], place[:, None] + torch.arange(3)][batch.real()]
        if not _same(model, shared[batch.real()], wanted):
            return "continuing from a prompt's cache gives it other states than the whole row does"
    return ""


def _try_packing(model: Any, decoder: nn.Module) -> bool:
    if not accepts(decoder, "position_ids"):
        return False
    ids = torch.arange(1, 7, device=_device(model))[None] % vocabulary(model)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=ids.device)
    with short_probe(model, exact=True):
        packed = run_decoder(decoder, ids, None, positions)
        alone = run_decoder(decoder, ids[:, 3:], None, positions[:, 3:])
    return _same(model, packed[:, 3:], alone)


def _same(model: Any, states: Tensor, wanted: Tensor) -> bool:
    eps = torch.finfo(working_dtype(model, states.device.type, exact=True)).eps
    scale = float(wanted.float().abs().max())
    return float((states - wanted).float().abs().max()) <= min(512 * eps, 5e-2) * scale


def _recomputes(model: Any) -> bool:
    # The second name is that of transformers before 5.24, where the first is unknown.
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):
        if hasattr(type(model), name):
            return bool(getattr(model, name))
    return False


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device
