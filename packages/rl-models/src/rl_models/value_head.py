"""A causal language model that also gives the value of each position, for actor-critic training."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from rl_models.wrapper import PreTrainedModelWrapper


class ValueHead(nn.Module):
    """Dropout and one linear unit: hidden states `[..., H]` to values `[...]`, in its own type.

    Args:
        hidden_size: H.
        dropout: probability at which inputs are dropped in training.
        init: None (as torch initialises a linear layer), "normal" (standard deviation
            `init_range`, bias 0) or "zero" (every value starts at 0).
        init_range: see `init`.

    Raises:
        ValueError: an `init` that is none of these.

    Example:
        >>> import torch
        >>> ValueHead(8, init="zero")(torch.ones(2, 3, 8)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        dropout: float = 0.0,
        init: str | None = None,
        init_range: float = 0.2,
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.summary = nn.Linear(hidden_size, 1)
        if init not in (None, "normal", "zero"):
            raise ValueError(f"v_head_init_strategy={init!r}; wanted None, 'normal' or 'zero'")
        if init is not None:
            nn.init.normal_(self.summary.weight, std=init_range if init == "normal" else 0.0)
            nn.init.zeros_(self.summary.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values `[...]` of hidden states `[..., H]`."""
        return self.summary(self.dropout(hidden).to(self.summary.weight.dtype)).squeeze(-1)


class ModelValues(NamedTuple):
    """What the forward returns: logits `[B, T, V]` float32, loss or None, values `[B, T]`."""

    logits: Tensor
    loss: Tensor | None
    values: Tensor


class AutoModelForCausalLMWithValueHead(PreTrainedModelWrapper):
    """A causal language model with a value head, saved together; the base stays plain transformers.

    Args:
        pretrained_model: the model, with or without PEFT adapters; the head is new.
        summary_dropout_prob: dropout before the head. 0 by default, so that values are the same
            when they are computed twice (the field's older libraries have 0.1).
        v_head_init_strategy: None, "normal" or "zero", see `ValueHead`.
        v_head_initializer_range: standard deviation for "normal".

    `from_pretrained` also takes `new_v_head=True`: start with a new head on a model that has none.

    Example:
        >>> import torch
        >>> from rl_models.testing import tiny_model
        >>> model = AutoModelForCausalLMWithValueHead(tiny_model("llama"))
        >>> logits, loss, values = model(torch.tensor([[5, 6, 7]]))
        >>> values.shape
        torch.Size([1, 3])
    """

    part_name: ClassVar[str] = "v_head"
    part_options: ClassVar[tuple[str, ...]] = (
        "summary_dropout_prob",
        "v_head_init_strategy",
        "v_head_initializer_range",
    )

    def __init__(
        self,
        pretrained_model: nn.Module,
        *,
        summary_dropout_prob: float = 0.0,
        v_head_init_strategy: str | None = None,
        v_head_initializer_range: float = 0.2,
    ) -> None:
        super().__init__(pretrained_model)
        self.v_head = ValueHead(
            self.hidden_size(),
            dropout=summary_dropout_prob,
            init=v_head_init_strategy,
            init_range=v_head_initializer_range,
        ).to(next(pretrained_model.parameters()).device)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> ModelValues:
        """Logits, loss (where `labels` are given) and the value of every position.

        Args:
            input_ids: `[B, T]`.
            attention_mask: `[B, T]`, 0 at padding.
            options: whatever else the model's forward takes.

        To score given tokens and get their values, `score_tokens(model, batch, return_hidden=True)`
        and then `model.v_head(hidden)` is the way that holds no logits.
        """
        options |= {"output_hidden_states": True, "return_dict": True}
        out = self.pretrained_model(input_ids, attention_mask=attention_mask, **options)
        return ModelValues(out.logits.float(), out.loss, self.v_head(out.hidden_states[-1]))
