"""Reference policies: frozen copy, shared lower layers, starting weights, moving average."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from rl_models.adapters import adapters_off, is_peft
from rl_models.batch import CompletionBatch, SequenceBatch
from rl_models.scoring import score_tokens

_DROPOUT = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0, that of attention and of whole layers included.

    Policy and reference differ at step 0 otherwise. Modules keep attention's dropout as a number,
    which turning off the dropout modules alone would miss. The config, which is saved, stays.

    Example:
        >>> from rl_models.testing import tiny_model
        >>> disable_dropout(tiny_model("llama", attention_dropout=0.5))
    """
    for module in model.modules():
        if isinstance(module, _DROPOUT):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name == "layerdrop"):
                setattr(module, name, 0.0)


def create_reference_model(
    model: Any, num_shared_layers: int | None = None, pattern: str | None = None
) -> Any:
    """A frozen copy of the model as it stands (edited or never saved ones too), without dropout.

    Args:
        model: a model without adapters; for one with adapters see `StartingReference`.
        num_shared_layers: the lowest layers that the copy shares with the model instead of copying;
            these are frozen in the model as well. The input embedding is shared too, unless it is
            tied to the head, which must train.
        pattern: the name of the layers' list, with `{layer}` for the number (as in
            "model.layers.{layer}."); None: found by their number.

    Returns:
        The copy, in eval mode, no weight of it trained.

    Raises:
        ValueError: adapters, more layers than there are, or layers that were not found.

    Example:
        >>> from rl_models.testing import tiny_model
        >>> model = tiny_model("llama")
        >>> reference = create_reference_model(model, num_shared_layers=1)
        >>> reference.model.layers[0].mlp.up_proj.weight is model.model.layers[0].mlp.up_proj.weight
        True
    """
    if is_peft(model):
        raise ValueError(
            "the model has adapters, and a copy of its base would be a second one in memory; use "
            "StartingReference(model), or adapters_off(model) for its base as the reference"
        )
    shared = _shared_parameters(model, num_shared_layers, pattern) if num_shared_layers else []
    for parameter in shared:
        parameter.requires_grad_(False)
    reference = copy.deepcopy(model, {id(parameter): parameter for parameter in shared})
    disable_dropout(reference)
    return reference.requires_grad_(False).eval()


def _shared_parameters(model: Any, count: int, pattern: str | None) -> list[nn.Parameter]:
    layers = pattern or _layers_pattern(model)
    names = [layers.format(layer=layer) for layer in range(count)]
    parameters = dict(model.named_parameters())
    shared = []
    for name in names:
        found = [value for key, value in parameters.items() if name in key]
        if not found:
            raise ValueError(
                f"num_shared_layers={count}, but no weight's name holds {name!r}; "
                "give fewer layers, or the pattern of their names"
            )
        shared += found
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    if head is None or head.weight is not embedding:
        shared.append(embedding)
    return shared


def _layers_pattern(model: Any) -> str:
    depth = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return f"{name}.{{layer}}."
    raise ValueError(f"no list of {depth} layers in {type(model).__name__}; give their pattern")


def check_not_shared(policy: nn.Module, reference: nn.Module) -> None:
    """Refuse a reference that would move with the policy because a trained weight is in both.

    Raises:
        ValueError: with the first such weight's name.
    """
    trained = {p.data_ptr(): n for n, p in policy.named_parameters() if p.requires_grad}
    for name, parameter in reference.named_parameters():
        if parameter.data_ptr() in trained and parameter.numel():
            raise ValueError(
                f"the reference's {name} is the policy's {trained[parameter.data_ptr()]}, which is "
                "trained, so the reference would move with it; use create_reference_model(policy)"
            )


def move_towards(reference: nn.Module, policy: nn.Module, mixup: float) -> None:
    """Moving average of weights: reference = mixup * policy + (1 - mixup) * reference.

    Raises:
        ValueError: mixup outside 0 to 1, or models whose weights' names differ.
    """
    pairs = dict(policy.named_parameters())
    mine = dict(reference.named_parameters())
    if pairs.keys() != mine.keys():
        names = sorted(pairs.keys() ^ mine.keys())[:2]
        raise ValueError(f"policy and reference do not have the same weights ({', '.join(names)})")
    _average(list(mine.values()), list(pairs.values()), mixup)


@torch.no_grad()
def _average(reference: list[Tensor], policy: list[Tensor], mixup: float) -> None:
    if not 0 <= mixup <= 1:
        raise ValueError(f"mixup={mixup}: wanted 0 (keep the reference) to 1 (take the policy)")
    for mine, other in zip(reference, policy, strict=True):
        if mine is not other:
            mine.lerp_(other.to(mine.device, mine.dtype), mixup)


class StartingReference:
    """The policy itself with the weights it trains as they were at the start.

    Holds a copy of the trained weights alone: of an adapter, its few; of a full model, all. A run
    that continues a non-zero adapter thereby starts with a margin of 0, and the reference may move.

    Example:
        >>> from rl_models.testing import tiny_model
        >>> policy = tiny_model("llama")
        >>> batch = CompletionBatch.from_ids([[1, 2]], [[3, 4]], [0])
        >>> ref_logps = StartingReference(policy).score(batch)
    """

    def __init__(self, policy: nn.Module) -> None:
        self._scorer = _Scorer(policy)
        self.weights = {
            name: value.detach().clone()
            for name, value in self._scorer.named_parameters()
            if value.requires_grad
        }

    def score(self, batch: SequenceBatch | CompletionBatch, *, temperature: float = 1.0) -> Tensor:
        """Log-probs of the batch under the starting weights, without dropout and gradients."""
        with torch.no_grad():
            return torch.func.functional_call(
                self._scorer, self.weights, (batch,), {"temperature": temperature}
            )

    def sync(self, mixup: float) -> None:
        """Move the kept weights towards the policy's by this part of the way (1: to them)."""
        policy = dict(self._scorer.named_parameters())
        _average(list(self.weights.values()), [policy[name] for name in self.weights], mixup)


class BaseReference:
    """The policy with its adapters off, or a model of its own; used as `StartingReference` is."""

    def __init__(self, model: nn.Module) -> None:
        self._scorer = _Scorer(model)

    def score(self, batch: SequenceBatch | CompletionBatch, *, temperature: float = 1.0) -> Tensor:
        """Log-probs of the batch under the base, without dropout and gradients."""
        with torch.no_grad(), adapters_off(self._scorer.model):
            return self._scorer(batch, temperature=temperature)


class _Scorer(nn.Module):
    """Scoring as a module's forward, in eval mode, so that a call can replace its weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: SequenceBatch | CompletionBatch, *, temperature: float) -> Tensor:
        training = {module: module.training for module in self.model.modules()}
        try:
            self.model.eval()
            return score_tokens(self.model, batch, temperature=temperature).logps
        finally:
            for module, mode in training.items():
                module.training = mode
