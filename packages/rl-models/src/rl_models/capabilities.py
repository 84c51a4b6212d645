"""What a model can do, found out by trying it once on a few tokens, not from a list of names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rl_models.batch import CompletionBatch
from rl_models.decoder import accepts, block_states, completion_states, run_decoder
from rl_models.heads import say_once, short_probe, working_dtype

_faults: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
_packs: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

# Rotary scalings whose frequencies depend on the longest row seen, so a prompt's keys would differ.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


def shared_states(
    model: Any, decoder: Any, batch: CompletionBatch, *, through_last: bool = False
) -> Tensor | None:
    """`completion_states` in the way that this model can, or None (said once) when it cannot."""
    reason = _why_no_cache(model, decoder)
    if not reason:
        return completion_states(decoder, batch, through_last=through_last)
    if _block_pays(decoder, batch) and not _fault(model, decoder, block_states):
        return block_states(decoder, batch, through_last=through_last)
    say_once(model, f"{reason}; a prompt is computed again for each of its completions")
    return None


def _why_no_cache(model: Any, decoder: Any) -> str:
    """Why this model cannot continue from a prompt's cache with gradients, "" when it can."""
    if model.training and _recomputes(model):
        return "gradient checkpointing forbids a cache"
    if model.training and getattr(decoder, "layerdrop", 0):
        return "layers are dropped at random in training"
    return _fault(model, decoder, completion_states)


def _block_pays(decoder: Any, batch: CompletionBatch) -> bool:
    """Whether one row for a prompt and all its completions costs less than a row for each.

    It saves the prompt's tokens, at 12 H^2 multiply-adds each and layer, and pays for it with
    query-key pairs of different completions, at 2 H each. Its mask knows of no sliding window.
    """
    config = decoder.config.get_text_config()
    used, prompt_index = torch.unique(batch.prompt_index, return_inverse=True)
    prompts = batch.prompt_lengths[used]
    lengths = prompts.index_add(0, prompt_index, batch.completion_lengths)
    rows = prompts[prompt_index] + batch.completion_lengths
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if int(lengths.max()) > min((window for window in windows if window), default=2**62):
        return False
    saved = int(rows.sum()) - int(lengths.sum())
    pairs = len(lengths) * int(lengths.max()) ** 2 - int(rows.square().sum())
    return 6 * config.hidden_size * saved > pairs


def keeps_samples_apart(model: Any, decoder: nn.Module) -> bool:
    """Whether packed samples, told apart by their positions alone, do not see each other."""
    if model not in _packs:
        _packs[model] = _try_packing(model, decoder)
    return _packs[model]


def _fault(model: Any, decoder: Any, way: Callable[..., Tensor]) -> str:
    """What is wrong with computing shared states in this way, found out once; "" when nothing."""
    known = _faults.setdefault(model, {})
    if way.__name__ not in known:
        # Tensors made in inference mode have no gradient, which the trial needs.
        with torch.inference_mode(False):
            known[way.__name__] = _try_sharing(model, decoder, way)
    return known[way.__name__]


def _try_sharing(model: Any, decoder: nn.Module, way: Callable[..., Tensor]) -> str:
    """The reason why sharing fails, "" when two prompts' completions come out as in plain rows."""
    scaling = getattr(model.config, "rope_parameters", None) or {}
    if scaling.get("rope_type") in _LENGTH_DEPENDENT:
        return f"its {scaling['rope_type']} rotary scaling depends on the length of the row"
    # Prompts of two lengths, and a completion of several tokens beside another of its prompt.
    prompts, completions = [[1, 2, 3], [4, 5]], [[6, 7, 8], [9, 10], [11, 8, 6]]
    batch = CompletionBatch.from_ids(prompts, completions, [0, 1, 1]).to(_device(model))
    rows = batch.as_sequences()
    last = batch.prompt_lengths[batch.prompt_index] - 1
    place = last[:, None] + torch.arange(3, device=last.device)

    def whole() -> Tensor:
        mask = torch.ones_like(rows.input_ids)
        states = run_decoder(decoder, rows.input_ids, mask, rows.positions())
        return states[torch.arange(3, device=last.device)[:, None], place][batch.real()]

    with short_probe(model, exact=True):
        wanted = _states_and_gradient(model, whole)
        try:
            shared = _states_and_gradient(model, lambda: way(decoder, batch)[batch.real()])
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            first = (str(error).splitlines() or [""])[0]
            return f"it cannot continue from a prompt's cache ({type(error).__name__}: {first})"
    if all(_same(model, mine, other) for mine, other in zip(shared, wanted, strict=True)):
        return ""
    return "a completion that continues from a prompt's cache comes out otherwise than in one row"


def _states_and_gradient(model: Any, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """States of a run, and the gradient of a mixture of them with regard to each token's embedding.

    The gradient is asked of the embeddings' outputs, so no weight gets one, frozen or not.
    """
    embedded: list[tuple[Tensor, Tensor]] = []

    def catch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        output = output.detach().requires_grad_()
        embedded.append((args[0], output))
        return output

    hook = model.get_input_embeddings().register_forward_hook(catch)
    try:
        with torch.enable_grad():
            states = run().float()
            mixture = torch.arange(states.numel(), device=states.device).cos().view_as(states)
            gradients = torch.autograd.grad((states * mixture).sum(), [x for _, x in embedded])
    finally:
        hook.remove()
    tokens = torch.cat([ids.flatten() for ids, _ in embedded])
    flat = torch.cat([gradient.flatten(0, 1).float() for gradient in gradients])
    return states.detach(), flat.new_zeros(12, flat.shape[1]).index_add(0, tokens, flat)


def _try_packing(model: Any, decoder: nn.Module) -> bool:
    if not accepts(decoder, "position_ids"):
        return False
    ids = torch.arange(1, 7, device=_device(model))[None]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=ids.device)
    with short_probe(model, exact=True):
        packed = run_decoder(decoder, ids, None, positions)
        alone = run_decoder(decoder, ids[:, 3:], torch.ones_like(ids[:, 3:]), positions[:, 3:])
    return _same(model, packed[:, 3:], alone)


def _same(model: Any, states: Tensor, wanted: Tensor) -> bool:
    eps = torch.finfo(working_dtype(model, states.device.type, exact=True)).eps
    # Quantised layers round by rows and outliers, whatever type they hand on.
    bound = 5e-2 if getattr(model, "is_quantized", False) else min(512 * eps, 5e-2)
    return float((states - wanted).float().abs().max()) <= bound * float(wanted.float().abs().max())


def _recomputes(model: Any) -> bool:
    # The second name is that of transformers before 5.24, where the first is unknown.
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):
        if hasattr(type(model), name):
            return bool(getattr(model, name))
    return False


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device
