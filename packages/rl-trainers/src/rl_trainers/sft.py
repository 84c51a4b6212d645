"""Supervised fine-tuning: the negative log-likelihood of the tokens that are trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rl_data import SFTCollator, prepare_sft_dataset
from rl_models import SequenceBatch, score_tokens
from rl_ops import losses
from rl_ops.losses.reduce import loss_denominator, reduce_loss
from rl_trainers.core.config import BaseConfig
from rl_trainers.core.trainer import BaseTrainer

logger = logging.getLogger(__name__)

LOSSES: dict[str, Callable[..., Tensor]] = {"nll": losses.nll, "dft": losses.dft}


@dataclass
class SFTConfig(BaseConfig):
    """Settings of :class:`SFTTrainer`.

    Raises:
        ValueError: an unknown loss type, or two different limits for one length.
    """

    learning_rate: float = field(default=2e-5, metadata={"help": "Peak learning rate."})
    max_length: int | None = field(
        default=1024, metadata={"help": "Longest row, or pack, in tokens; longer ones are cut."}
    )
    max_seq_length: int | None = field(
        default=None, metadata={"help": "The same as max_length, by its other name."}
    )
    dataset_text_field: str = field(default="text", metadata={"help": "Column of plain text."})
    packing: bool = field(default=False, metadata={"help": "Several rows in one sequence."})
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = field(
        default="bfd", metadata={"help": "How rows are packed; bfd cuts rows at the length."}
    )
    completion_only_loss: bool | None = field(
        default=None,
        metadata={"help": "Train the completion alone; None does so where rows have a prompt."},
    )
    assistant_only_loss: bool = field(
        default=False, metadata={"help": "Train the assistant's turns alone."}
    )
    loss_type: Literal["nll", "dft"] = field(default="nll", metadata={"help": "The loss formula."})
    dataset_num_proc: int | None = field(
        default=None, metadata={"help": "Processes that tokenise the dataset."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type not in LOSSES:
            raise ValueError(f"loss_type={self.loss_type!r}: choose one of {sorted(LOSSES)}")
        if self.max_seq_length is not None:
            if self.max_length not in (1024, self.max_seq_length):
                raise ValueError(
                    f"max_length={self.max_length} and max_seq_length={self.max_seq_length} are "
                    "two names of one limit: set one of them"
                )
            self.max_length = self.max_seq_length


class SFTTrainer(BaseTrainer):
    """Trains on text, conversations, or prompts with completions.

    Rows are rendered, tokenised and cut before training; what was cut or dropped is counted and
    logged. The loss is the mean over all trained tokens of the optimiser step, however it is split.

    Args:
        model: a model, or the name, folder or GGUF file of one.
        args: the config.
        train_dataset: rows of one of the formats that ``rl_data`` knows.
        eval_dataset: the same.
        formatting_func: turns a row into text before anything else.
        **kwargs: see :class:`BaseTrainer`.

    Example:
        >>> trainer = SFTTrainer(  # doctest: +SKIP
        ...     "HuggingFaceTB/SmolLM2-135M", SFTConfig(output_dir="run"), train_dataset=dataset
        ... )
        >>> trainer.train()  # doctest: +SKIP
    """

    args: SFTConfig

    def __init__(
        self,
        model: Any,
        args: SFTConfig | None = None,
        *,
        train_dataset: Any | None = None,
        eval_dataset: Any | None = None,
        formatting_func: Callable[[Mapping[str, Any]], str] | None = None,
        data_collator: Any | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, args or SFTConfig(), **kwargs)
        self.formatting_func = formatting_func
        self.train_dataset = self._prepare(train_dataset, "train_dataset")
        self.eval_dataset = self._prepare(eval_dataset, "eval_dataset")
        self.data_collator = data_collator or SFTCollator(self.processing_class.pad_token_id or 0)

    def _prepare(self, dataset: Any | None, name: str) -> Any | None:
        if dataset is None:
            return None
        args = self.args
        shared: dict[str, Any] = {
            "max_length": args.max_length,
            "completion_only_loss": args.completion_only_loss,
            "assistant_only_loss": args.assistant_only_loss,
            "dataset_text_field": args.dataset_text_field,
            "formatting_func": self.formatting_func,
        }
        self.audit_dataset(dataset, name, **shared)
        prepared, report = prepare_sft_dataset(
            dataset,
            self.processing_class,
            packing=args.packing,
            packing_strategy=args.packing_strategy,
            num_proc=args.dataset_num_proc,
            **shared,
        )
        logger.warning("%s: %s", name, report)
        return prepared

    def count_denominator(self, batch: dict[str, Tensor]) -> Tensor:
        """The trained tokens of this batch."""
        return loss_denominator(batch["loss_mask"], mode="token_mean")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """Sum of the tokens' losses over the trained tokens of the whole step."""
        values, mask = self._token_losses(model, inputs)
        if num_items_in_batch is None:
            num_items_in_batch = self.count_denominator(inputs)
        loss = reduce_loss(values, mask, mode="token_mean", denominator=num_items_in_batch)
        self.metrics.add("trained_tokens", mask.sum())
        loss = loss * self.rank_factor
        return (loss, values) if return_outputs else loss

    def _token_losses(self, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        mask = inputs["loss_mask"].bool()
        batch = SequenceBatch(
            inputs["input_ids"],
            mask,
            attention_mask=inputs["attention_mask"],
            position_ids=inputs["position_ids"],
        )
        return LOSSES[self.args.loss_type](score_tokens(model, batch).logps, mask), mask

    @torch.no_grad()
    def evaluate(
        self,
        eval_dataset: Any | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Mean loss over all trained tokens of the dataset, exact for any batch size and ranks."""
        loader = self.get_eval_dataloader(eval_dataset)
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        for batch in loader:
            with self.compute_loss_context_manager():
                values, mask = self._token_losses(self.model, batch)
            total += torch.stack([values.double().sum(), mask.double().sum()])
        loss, tokens = self.sum_over_ranks(total).tolist()
        results = {
            f"{metric_key_prefix}_loss": loss / tokens,
            f"{metric_key_prefix}_tokens": tokens,
        }
        self.log(dict(results))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, results
        )
        return results
