"""Finding a model's decoder and head, and proving that they give the model's own logits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl_ops import linear_selective_log_softmax, logps_and_entropy, selective_log_softmax

# Numbers of one logits chunk where the head has to be called as a module: 128 MiB in float32.
_CHUNK_ELEMENTS = 2**25
_found: WeakKeyDictionary[nn.Module, Head | str] = WeakKeyDictionary()
_warned: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Head:
    """How a model turns its last hidden state into logits: `cap(scale * (hidden @ W.T + b))`."""

    decoder_name: str
    scale: float
    softcap: float | None


def unwrap(model: nn.Module) -> Any:
    """The transformers model inside a value-head wrapper or a PEFT model (adapters stay active).

    Raises:
        TypeError: a distributed wrapper, whose own forward must be what the trainer calls.
        ValueError: prompt-learning adapters, whose virtual tokens would shift every position.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise TypeError(
            f"score_tokens got a {type(model).__name__}, whose gradient sync runs only in its own "
            "forward; call score_tokens inside the forward of the module that is wrapped"
        )
    inner: Any = getattr(model, "pretrained_model", model)
    if hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
        if inner.active_peft_config.is_prompt_learning:
            raise ValueError(
                "the active adapter puts virtual tokens before the prompt, which shifts every "
                "position; use a LoRA-like adapter"
            )
        inner = inner.get_base_model()
    return inner


def say_once(model: nn.Module, message: str) -> None:
    """Warn once per model and message."""
    said = _warned.setdefault(model, set())
    if message not in said:
        said.add(message)
        warnings.warn(f"{type(model).__name__}: {message}", stacklevel=3)


def find_head(model: nn.Module) -> Head | None:
    """The model's head, proved once on a short row; None (said once) when it is not recognised.

    The proof compares decoder + head + scale + soft cap with the logits of the model's own forward,
    in the dtype it is used in, so a model with an unknown step after its head is scored from its
    full logits instead of wrongly.
    """
    if model not in _found:
        _found[model] = _prove_head(model)
    found = _found[model]
    if isinstance(found, str):
        say_once(model, f"{found}; scoring from its full logits instead, which needs more memory")
        return None
    return found


def decoder_of(model: nn.Module, head: Head) -> nn.Module:
    """The decoder that `find_head` chose (looked up anew: adapters may have been added since)."""
    return dict(_decoders(model))[head.decoder_name]


def _decoders(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name in ("get_decoder", "base_model"):
        decoder = getattr(model, name, None)
        if name == "get_decoder" and decoder is not None:
            decoder = decoder()
        if isinstance(decoder, nn.Module) and decoder is not model:
            yield name, decoder


def _prove_head(model: nn.Module) -> Head | str:
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if output is None:
        return "it names no output embedding"
    with short_probe(model):
        ids = torch.arange(1, 5, device=next(model.parameters()).device)[None]
        logits = model(input_ids=ids, use_cache=False).logits.float()
        eps = torch.finfo(working_dtype(model, ids.device.type)).eps
        tolerance = min(64 * eps, 2e-2) * float(logits.abs().max())
        for name, decoder in _decoders(model):
            raw = output(_fit(decoder(input_ids=ids, use_cache=False)[0], output))
            for scale, softcap in _candidates(model.config):
                mine = _scaled(raw, scale, softcap)
                if mine.shape == logits.shape and float((mine - logits).abs().max()) <= tolerance:
                    return Head(name, scale, softcap)
    return "decoder, head, scale and soft cap do not give the logits of its own forward"


def _candidates(config: Any) -> Iterator[tuple[float, float | None]]:
    """Scale and soft cap that the configuration may mean; the proof picks among them."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(
        config, "logits_soft_cap", None
    )
    scales = [1.0]
    for field in ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"):
        value = getattr(config, field, None)
        if isinstance(value, int | float) and value not in (0, 1):
            # Granite divides by the field that HyperCLOVA multiplies with.
            scales += [float(value), 1.0 / float(value)]
    for scale in reversed(scales):
        yield scale, softcap
    if softcap is not None:
        yield 1.0, None


def _scaled(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    logits = logits.float() * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _fit(hidden: Tensor, output: Any) -> Tensor:
    """Hidden states in the head's type, where a model keeps its residual stream in another."""
    dtype = output.weight.dtype
    if not dtype.is_floating_point or torch.is_autocast_enabled(hidden.device.type):
        return hidden
    return hidden.to(dtype)


def vocabulary(model: Any) -> int:
    """Rows of the embedding."""
    return model.get_input_embeddings().weight.shape[0]


def working_dtype(model: nn.Module, device_type: str, *, exact: bool = False) -> torch.dtype:
    """The type that matrix products run in: autocast's, unless `exact`, or the weights'."""
    if not exact and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


@contextmanager
def short_probe(model: nn.Module, *, exact: bool = False) -> Iterator[None]:
    """Run a forward for its values alone: no graph, no dropout, and nothing left behind.

    `exact` leaves autocast, so that the comparison is as fine as the weights' type.

    Autocast keeps the casts of weights for the next forward; casts made without a graph would cut
    the gradient of a later training forward in the same context, hence the cache is off here.
    """
    training = {module: module.training for module in model.modules()}
    device_type = next(model.parameters()).device.type
    autocast = torch.autocast(
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type) and not exact,
        cache_enabled=False,
    )
    try:
        model.eval()
        with torch.no_grad(), autocast:
            yield
    finally:
        for module, mode in training.items():
            module.training = mode


def head_logps(
    model: Any, head: Head, hidden: Tensor, index: Tensor, *, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs `[M]` of tokens `index` `[M]` from hidden states `[M, H]`, and the entropy `[M]`.

    A plain linear head goes through the fused kernel; anything else (an adapter on the head, a
    quantised head) is called as the module it is, chunk by chunk and recomputed in the backward.
    """
    if not len(index):  # nothing to score, but a graph that backward can walk
        nothing = hidden.float().sum(-1)
        return nothing, nothing if entropy else None
    output = model.get_output_embeddings()
    hidden = _fit(hidden, output)
    if type(output) is nn.Linear and "forward" not in vars(output):
        fused: Any = linear_selective_log_softmax(
            hidden,
            output.weight,
            index,
            bias=output.bias,
            temperature=temperature,
            logit_softcap=head.softcap,
            logit_scale=head.scale,
            return_entropy=entropy,
        )
        return (fused.logps, fused.entropy) if entropy else (fused, None)

    def chunk(hidden: Tensor, index: Tensor) -> Tensor:
        logits = _scaled(output(hidden), head.scale, head.softcap)
        return logits_logps(logits, index, temperature=temperature, entropy=entropy)

    size = max(1, _CHUNK_ELEMENTS // vocabulary(model))
    parts = [
        checkpoint(chunk, h, i, use_reentrant=False)
        for h, i in zip(hidden.split(size), index.split(size), strict=True)
    ]
    scores = torch.cat(parts, 1)
    return scores[0], scores[1] if entropy else None


def logits_logps(logits: Tensor, index: Tensor, *, temperature: float, entropy: bool) -> Tensor:
    """Log-probs, and below them the entropy where wanted, of logits `[M, V]`: `[1 or 2, M]`."""
    if entropy:
        return torch.stack(logps_and_entropy(logits, index, temperature=temperature))
    return selective_log_softmax(logits, index, temperature=temperature)[None]
