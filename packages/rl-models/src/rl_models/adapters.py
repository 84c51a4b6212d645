"""PEFT adapters: switched off for a reference, merged into weights for an engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def is_peft(model: nn.Module) -> bool:
    """Whether the model carries PEFT adapters (told without importing peft)."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Within it, a PEFT model computes as its base does; a model without adapters is left alone.

    Example:
        >>> from rl_models.testing import tiny_model
        >>> with adapters_off(tiny_model("llama")):
        ...     pass
    """
    if not is_peft(model):
        yield
        return
    with model.disable_adapter():
        yield


def merged_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the base model's weights with the active adapters merged in.

    For an engine that knows nothing of adapters: the names are the base model's own. One layer at a
    time is copied, merged in float32 and rounded once to the weight's type; the model itself is not
    touched, so nothing drifts however often this is called. A model without adapters gives its own
    weights. Weights that are tied come under each of their names.

    Raises:
        ValueError: a layer whose base is quantised; its blocks cannot take up an adapter exactly.

    Example:
        >>> from rl_models.testing import tiny_model
        >>> sorted(dict(merged_weights(tiny_model("llama"))))[0]
        'lm_head.weight'
    """
    base = model.get_base_model() if is_peft(model) else model
    prefixes: list[str] = []
    for name, module in base.named_modules():
        inside = any(name.startswith(prefix) for prefix in prefixes)
        if inside or not (_is_tuner_layer(module) or _is_training_wrapper(module)):
            continue
        prefixes.append(f"{name}.")
        for key, value in _merged(name, module).state_dict().items():
            yield f"{name}.{key}", value
    for name, value in base.state_dict().items():
        if not name.startswith(tuple(prefixes)):
            yield name, value


def _is_tuner_layer(module: nn.Module) -> bool:
    return hasattr(module, "get_base_layer") and hasattr(module, "merge")


def _is_training_wrapper(module: nn.Module) -> bool:
    """A module that is saved or whose tokens are trained beside the adapter."""
    return hasattr(module, "unload_and_optionally_merge_module")


@torch.no_grad()
def _merged(name: str, module: Any) -> nn.Module:
    """A copy of the layer that the adapter stands around, the adapter merged into it."""
    wrapper = _is_training_wrapper(module)
    layer = module.original_module if wrapper else module.get_base_layer()
    dtypes = {key: value.dtype for key, value in layer.state_dict().items()}
    if not all(dtype.is_floating_point for dtype in dtypes.values()):
        raise ValueError(
            f"{name} is quantised, so its adapter cannot be merged exactly; "
            "load the base without quantization, or give the engine the adapter's files"
        )
    spare = copy.deepcopy(module).float()
    if wrapper:
        result = spare.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
    else:
        spare.merge()
        result = spare.get_base_layer()
    for key, value in result.named_parameters():
        value.data = value.data.to(dtypes[key])
    return result
