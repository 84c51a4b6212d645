"""The base of every trainer: what ``transformers.Trainer`` leaves open, closed in one place."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProgressCallback,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_callback import PrinterCallback

from rl_data import audit
from rl_models import check_tokenizer, disable_dropout, load_causal_lm, load_tokenizer
from rl_trainers.core.config import BaseConfig, as_mapping
from rl_trainers.core.guards import FiniteGradients
from rl_trainers.core.metrics import Metrics
from rl_trainers.core.progress import ProgressLine
from rl_trainers.core.run_folder import RunFolderCallback

logger = logging.getLogger(__name__)


class BaseTrainer(Trainer):
    """``transformers.Trainer`` with denominators counted over the whole optimiser step.

    A subclass says how a batch adds to the denominator (:meth:`count_denominator`) and how a
    batch becomes a loss (``compute_loss``, which receives the step's denominator as
    ``num_items_in_batch``). The gradient then is the same for every split of the step into
    micro-batches and ranks.

    Args:
        model: a model, or the name, folder or GGUF file of one (see ``rl_models.load_causal_lm``).
        args: the trainer's config.
        processing_class: the tokenizer; by default the model's own.
        peft_config: wraps the model in an adapter (needs ``peft``).
        **trainer_kwargs: passed to ``transformers.Trainer`` as they are.

    Raises:
        ValueError: the tokenizer can neither be found nor was passed; several GPUs or processes.
    """

    args: BaseConfig
    model: PreTrainedModel
    processing_class: PreTrainedTokenizerBase
    train_dataset: Any
    eval_dataset: Any

    # What compute_loss returns is already divided by the step's denominator.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: BaseConfig,
        *,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: Any | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        **trainer_kwargs: Any,
    ) -> None:
        _refuse_several_devices(args)
        name = model if isinstance(model, str) else model.config.name_or_path
        if processing_class is None:
            processing_class = _tokenizer_of(name)
        if isinstance(model, str):
            model = load_causal_lm(model, **as_mapping("model_init_kwargs", args.model_init_kwargs))
        elif args.model_init_kwargs:
            raise ValueError("model_init_kwargs has no effect on a model that is already loaded")
        if peft_config is not None:
            model = _with_adapter(model, peft_config)
        check_tokenizer(processing_class, model)
        _align_special_tokens(model, processing_class)
        if args.disable_dropout:
            disable_dropout(model)
        self.metrics = Metrics()
        super().__init__(
            model=model,
            args=args,
            processing_class=processing_class,
            callbacks=list(callbacks or []),
            **trainer_kwargs,
        )
        # The same statement for releases of transformers that ask this instead.
        self.model_accepts_loss_kwargs = True
        for printer in (ProgressCallback, PrinterCallback):
            self.remove_callback(printer)
        if not args.disable_tqdm:
            self.add_callback(ProgressLine())
        self.add_callback(FiniteGradients())
        self.add_callback(RunFolderCallback())

    def audit_dataset(self, dataset: Any, name: str, **options: Any) -> None:
        """Look through some rows as training will see them, and say in one line what is wrong."""
        if dataset is None or not self.args.audit_rows:
            return
        report = audit(dataset, self.processing_class, max_rows=self.args.audit_rows, **options)
        logger.warning("%s: %s", name, report.summary())

    def count_denominator(self, batch: Any) -> Tensor:
        """What ``batch`` adds to the denominator of its optimiser step: a scalar tensor."""
        raise NotImplementedError

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """Fetch an optimiser step's micro-batches and count their denominator over all ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        total = torch.stack([self.count_denominator(b).double() for b in batches]).sum()
        return batches, self.sum_over_ranks(total.to(device))

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum of ``tensor`` over all ranks; itself where there is one."""
        if self.accelerator.num_processes == 1:
            return tensor
        return self.accelerator.reduce(tensor.to(self.accelerator.device), reduction="sum")

    @property
    def rank_factor(self) -> int:
        """Undoes the averaging of gradients over ranks: a loss is a sum over a global count."""
        return self.accelerator.num_processes

    def compute_loss_context_manager(self) -> ExitStack:
        """Autocast as configured, around the whole loss: the scorer calls parts of the model."""
        stack = super().compute_loss_context_manager()
        stack.enter_context(self.accelerator.autocast())
        return stack

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """One micro-batch; stops the run where the loss is not finite.

        Raises:
            FloatingPointError: the loss is NaN or infinite; the step is not applied.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}: the step was not "
                "applied. Lower the learning rate, or look for rows whose log-probabilities are "
                "not finite"
            )
        return loss

    def floating_point_ops(self, inputs: Any) -> int:
        """Not estimated: the parent's formula presumes one forward of dense, padded rows."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the means of what was measured since the last line, then log."""
        if "loss" in logs:
            logs.update(self.metrics.drain(self.sum_over_ranks))
        super().log(logs, start_time)


def _tokenizer_of(name: str | None) -> PreTrainedTokenizerBase:
    if not name:
        raise ValueError(
            "the model names no folder to take its tokenizer from: pass processing_class"
        )
    return load_tokenizer(name)


def _refuse_several_devices(args: BaseConfig) -> None:
    if args.world_size > 1:
        raise ValueError(
            f"{args.world_size} processes were started: these trainers run in one process so far"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible: these trainers use one so far; choose it with "
            "CUDA_VISIBLE_DEVICES=0"
        )


def _with_adapter(model: PreTrainedModel, peft_config: Any) -> PreTrainedModel:
    try:
        from peft import PeftModel, get_peft_model
    except ImportError as error:
        raise ImportError(
            "peft_config was passed, but peft is not installed: pip install 'rl-trainers[peft]'"
        ) from error
    if isinstance(model, PeftModel):
        raise ValueError(
            "the model already carries an adapter: merge it first, or leave peft_config out to "
            "train that adapter on"
        )
    return get_peft_model(model, peft_config)


def _align_special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer a pad token; its value reaches no mask, so eos will do."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.get_text_config().pad_token_id is None:
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
