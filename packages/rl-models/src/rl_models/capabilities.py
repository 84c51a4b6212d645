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
    """`completion_states` in the cheapest way the model can; None (said once) when in none."""
    costs = _costs(decoder, batch)
    reason = _why_no_cache(model)
    if reason:
        del costs[completion_states]
    for way in sorted(costs, key=lambda way: costs[way]):
        if not (fault := _fault(model, decoder, way)):
            return way(decoder, batch, through_last=through_last)
        if way is completion_states:
            reason = fault
    say_once(model, f"{reason}; a prompt is computed again for each of its completions")
    return None


def _why_no_cache(model: Any) -> str:
    """Why this model, as it is set now, cannot have a cache with gradients; "" when it can."""
    if model.training and _recomputes(model):
        return "gradient checkpointing forbids a cache"
    if model.training and any(getattr(module, "layerdrop", 0) for module in model.modules()):
        return "layers are dropped at random in training"
    return ""


def _costs(decoder: Any, batch: CompletionBatch) -> dict[Callable[..., Tensor], float]:
    """What each way costs a layer, in units of 2 H multiply-adds; ways that never pay are left out.

    A token costs 12 H^2, a query-key pair 2 H, padding as much as the rest. The cache runs
    completions in rows as long as the longest of them; one row a prompt pads little, but has
    its completions side by side and pays for the pairs among them. Its mask knows of no window.
    """
    config = decoder.config.get_text_config()
    used, prompt_index = torch.unique(batch.prompt_index, return_inverse=True)
    prompts, lengths = batch.prompt_lengths[used], batch.completion_lengths
    prompt, completion = int(prompts.max()), int(lengths.max())
    count, rows = len(prompts), len(lengths)
    width = int(prompts.index_add(0, prompt_index, lengths).max())

    def cost(tokens: int, pairs: int) -> float:
        return 6.0 * config.hidden_size * tokens + pairs

    run = completion * rows
    cached = cost(count * prompt + run, count * prompt**2 + run * (prompt + completion))
    block = cost(count * width, count * width**2)
    plain = cost(rows * prompt + run, rows * (prompt + completion) ** 2)
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    fits = width <= min((window for window in windows if window), default=width)
    costs: dict[Callable[..., Tensor], float] = {completion_states: cached}
    if fits and block < plain:
        costs[block_states] = 1.1 * block  # small differences do not change the way
    return costs


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
