"""The one online trainer: prompts, rollouts, rewards, advantages, micro-batches.

A method (GRPO, RLOO, ...) adds how rewards become advantages and how scores become a loss.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rl_decode.stops import collect_stop_ids
from rl_models import score_tokens
from rl_trainers.core.config import as_mapping
from rl_trainers.core.trainer import BaseTrainer
from rl_trainers.online.checks import check_rows, compare_with_engine
from rl_trainers.online.completions_log import write_completions
from rl_trainers.online.config import OnlineConfig
from rl_trainers.online.measure import measure_groups, measure_rewards
from rl_trainers.online.plan import Plan, WindowSampler
from rl_trainers.online.sample import sample_groups, set_rewards, shown_to_rewards
from rl_trainers.online.window import Group, MicroBatch, collate_groups, split_evenly
from rl_trainers.rewards import RewardRunner, load_reward_function
from rl_trainers.rollouts import InProcessEngine, RolloutEngine, SamplingParams

RESUMED_INSIDE_A_WINDOW = (
    "the run resumed inside a window of completions that is used for several updates; the window "
    "is sampled anew from the resumed weights, so the run will not equal an unbroken one. Save at "
    "multiples of steps_per_generation / gradient_accumulation_steps * num_iterations steps"
)

Groups = Sequence[Group]


class OnlineTrainer(BaseTrainer):
    """Samples completions of the dataset's prompts and trains on them.

    Args:
        model: a model, or the name, folder or GGUF file of one.
        args: the method's config.
        train_dataset: rows with a ``prompt`` (text or messages); further columns reach the
            reward functions.
        eval_dataset: the same, for :meth:`evaluate`.
        reward_funcs: one callable or several; ``args.reward_functions`` names them otherwise.
        engine: generates the completions; by default the model itself, in this process.
        **kwargs: see :class:`BaseTrainer`.

    Raises:
        ValueError: no reward function, or a dataset without prompts.
        TypeError: a reward function that cannot be called.
    """

    args: OnlineConfig

    def __init__(
        self,
        model: Any,
        args: OnlineConfig,
        *,
        train_dataset: Any | None = None,
        eval_dataset: Any | None = None,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        engine: RolloutEngine | None = None,
        **kwargs: Any,
    ) -> None:
        self.rewards = _reward_runner(reward_funcs, args)
        check_rows(train_dataset, "train_dataset")
        check_rows(eval_dataset, "eval_dataset")
        super().__init__(
            model, args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs
        )
        template = as_mapping("chat_template_kwargs", args.chat_template_kwargs)
        self.audit_dataset(
            train_dataset, "train_dataset", max_length=None, chat_template_kwargs=template
        )
        self.stop_ids = collect_stop_ids(
            self.processing_class, getattr(self.model, "generation_config", None)
        )
        self._save_stop_ids()
        self.engine = engine or self._own_engine()
        self._parts: list[list[Group]] = []
        self._denominators: list[Tensor] = []
        self._micro_step = 0
        self._engine_agrees = False
        self._extra: dict[str, list[Any]] = {}
        self._tokens, self._tokens_since = 0, time.perf_counter()

    # --- what a method defines -------------------------------------------------------------

    def compute_advantages(self, rewards: Tensor) -> Tensor:
        """Advantages ``[N]`` of rewards ``[N]``, groups of ``num_generations`` in a row."""
        raise NotImplementedError

    def needs_every_group(self) -> bool:
        """Whether the loss has terms that reach groups whose advantages are all 0."""
        return False

    def denominator_of(self, mask: Tensor) -> Tensor:
        """What completions with this mask ``[N, T]`` add to the step's denominator."""
        raise NotImplementedError

    # --- the data ---------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Which prompts are sampled when; ``print(trainer.plan())`` shows the sizes."""
        args = self.args
        return Plan(
            num_prompts=len(self.train_dataset),
            prompts_per_micro_step=args.per_device_train_batch_size,
            micro_steps_per_window=args.steps_per_generation or 1,
            num_iterations=args.num_iterations,
            num_ranks=self.accelerator.num_processes,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.shuffle_dataset,
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The windows of this rank; see :class:`Plan`."""
        plan = self.plan()

        def epoch() -> int:
            return self.state.global_step * self._accumulation // plan.micro_steps_per_epoch

        rank = self.accelerator.process_index
        return DataLoader(
            self.train_dataset,
            batch_sampler=WindowSampler(plan, rank=rank, epoch=epoch),
            collate_fn=list,
            num_workers=self.args.dataloader_num_workers,
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """Fetch the rows of the step's micro-steps; their denominator is known once sampled."""
        return [rows for _, rows in zip(range(num_batches), epoch_iterator, strict=False)], None

    def training_step(
        self,
        model: nn.Module,
        inputs: Any,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Generate at the start of a window, then train on this micro-step's share of it.

        ``inputs`` are the dataset rows of the window.
        """
        accumulation = self.args.gradient_accumulation_steps
        micro_steps = self.args.steps_per_generation or 1
        if self._micro_step % accumulation == 0:
            # Counted anew from the optimiser steps, so that a resumed run is in its window.
            self._micro_step = self.state.global_step * accumulation
        place = self._micro_step % (micro_steps * self.args.num_iterations)
        if place == 0 or not self._parts:
            if place:
                warnings.warn(RESUMED_INSIDE_A_WINDOW, stacklevel=2)
            self._fill_window(inputs, micro_steps)
        self._micro_step += 1
        place %= micro_steps
        groups = self._parts[place]
        if not groups:
            return self._step_without_gradient(model)
        started = time.perf_counter()
        micro_batch = self._collate(groups)
        denominator = self._denominators[place // accumulation]
        loss = super().training_step(model, {"micro_batch": micro_batch}, denominator)
        self.metrics.add("seconds/train", time.perf_counter() - started)
        return loss

    # --- generating and scoring ---------------------------------------------------------------

    def _fill_window(self, rows: list[dict[str, Any]], micro_steps: int) -> None:
        started = time.perf_counter()
        groups = self._generate_and_score_completions(rows)
        prompts = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        self._parts, self._denominators = [], []
        for first in range(0, len(groups), prompts):
            step = groups[first : first + prompts]
            part = self._denominator(step)
            self._denominators.append(self.sum_over_ranks(part).clamp_min(1.0))
            self._parts += split_evenly(self._sent_to_model(step), self._accumulation)
        if len(self._parts) > self._accumulation or self.args.num_iterations > 1:
            self._remember_old_logps()
        self.metrics.add("seconds/window", time.perf_counter() - started)

    @property
    def _accumulation(self) -> int:
        return self.args.gradient_accumulation_steps

    def _generate_and_score_completions(self, rows: list[dict[str, Any]]) -> list[Group]:
        """Sample ``num_generations`` completions of each row, reward them, log them."""
        started = time.perf_counter()
        self.engine.sync_weights(self.accelerator.unwrap_model(self.model_wrapped))
        seed = self.args.seed + 1 + self.state.global_step
        seed += 100_003 * self.accelerator.process_index
        groups = self._sample(rows, self.args.num_generations, self.args.sampling(), seed)
        generated = time.perf_counter()
        self._reward(groups)
        self._set_advantages(groups)
        self.metrics.add("seconds/generate", generated - started)
        self.metrics.add("seconds/reward", time.perf_counter() - generated)
        measure_groups(self.metrics, groups)
        self._tokens += sum(len(g.prompt_ids) + sum(len(r.ids) for r in g.rollouts) for g in groups)
        if self.args.log_completions:
            write_completions(
                Path(str(self.args.output_dir)),
                groups,
                step=self.state.global_step + 1,
                reward_names=self.rewards.names,
                extra=self._extra,
                rank=self.accelerator.process_index,
            )
        return groups

    def _sample(
        self, rows: Sequence[Any], n: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        return sample_groups(
            self.engine,
            self.processing_class,
            rows,
            n=n,
            sampling=sampling,
            seed=seed,
            stop_ids=self.stop_ids,
            chat_template_kwargs=as_mapping("chat_template_kwargs", self.args.chat_template_kwargs),
        )

    def _reward(self, groups: Groups, prefix: str = "") -> None:
        """Fill in the rewards of ``groups`` and measure them."""
        self._extra = {}
        shown = shown_to_rewards(groups) | {
            "trainer_state": self.state,
            "log_metric": lambda name, value: self.metrics.add(f"{prefix}{name}", value),
            "log_extra": self._extra.__setitem__,
        }
        scored = self.rewards(shown, count=sum(len(group.rollouts) for group in groups))
        set_rewards(groups, scored, train_truncated=not self.args.mask_truncated_completions)
        measure_rewards(self.metrics, scored, prefix)

    def _set_advantages(self, groups: Groups) -> None:
        """Advantages over the windows of all ranks: a batch-wide scale needs every reward."""
        own = torch.cat([group.rewards for group in groups]).to(self.accelerator.device)
        rewards = self.accelerator.gather(own) if self.accelerator.num_processes > 1 else own
        first = self.accelerator.process_index * len(own)
        advantages = self.compute_advantages(rewards)[first : first + len(own)].cpu()
        for group, chunk in zip(groups, advantages.split(self.args.num_generations), strict=True):
            group.advantages = chunk

    # --- micro-batches ------------------------------------------------------------------------

    def _denominator(self, groups: Groups) -> Tensor:
        """The part of these groups, those without signal included."""
        lengths = [
            len(r.ids) if trained else 0
            for group in groups
            for r, trained in zip(group.rollouts, group.trained, strict=True)
        ]
        mask = torch.arange(max(lengths, default=0)) < torch.tensor(lengths).unsqueeze(-1)
        return self.denominator_of(mask)

    def _sent_to_model(self, groups: list[Group]) -> list[Group]:
        """Leave out the groups that add nothing to the gradient."""
        if self.needs_every_group():
            return groups
        live = [group for group in groups if group.has_signal]
        # Ranks meet in the backward pass, so each of them has to run one.
        if self.accelerator.num_processes > 1 and len(live) < self._accumulation:
            live += [group for group in groups if not group.has_signal]
        return live

    def _collate(self, groups: Groups) -> MicroBatch:
        return collate_groups(
            groups, pad_token_id=self.engine_pad_id, device=self.accelerator.device
        )

    @property
    def engine_pad_id(self) -> int:
        """Fills ragged rows; masks come from lengths, so its value is never looked at."""
        return self.processing_class.pad_token_id or 0

    def _step_without_gradient(self, model: nn.Module) -> Tensor:
        """A micro-step none of whose groups has signal: zero gradients, no pass through the model.

        Gradients become zeros rather than stay ``None``: the optimiser then makes the same update
        (of its momentum) that it would make after a backward pass that gave zeros.
        """
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return torch.zeros((), device=self.args.device)

    @torch.no_grad()
    def _remember_old_logps(self) -> None:
        """Keep the sampling policy's log-probs for windows that outlive one update."""
        self.model.eval()
        for groups in self._parts:
            if not groups:
                continue
            micro_batch = self._collate(groups)
            with self.compute_loss_context_manager():
                logps = self.score_policy(self.model, micro_batch).cpu()
            rows = iter(logps)
            for group in groups:
                group.old_logps = [next(rows)[: len(r.ids)] for r in group.rollouts]

    def score_policy(self, model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        """Log-probs ``[N, T]`` at the sampling temperature; at first the engine must agree.

        The first pass is made with the weights that sampled, also in a run that resumes.
        """
        logps = score_tokens(model, micro_batch.batch, temperature=self.args.temperature).logps
        if not self._engine_agrees:
            compare_with_engine(logps.detach(), micro_batch, half=bool(self.args.bf16))
            self._engine_agrees = True
        return logps

    # --- evaluation and logging ---------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Sample each prompt ``eval_num_generations`` times and log the rewards."""
        rows = eval_dataset if eval_dataset is not None else self.eval_dataset
        check_rows(rows, "eval_dataset")
        if rows is None:
            raise ValueError("evaluate() needs an eval_dataset: pass one here or when constructing")
        self.engine.sync_weights(self.accelerator.unwrap_model(self.model_wrapped))
        kept, self.metrics = self.metrics, type(self.metrics)()
        prefix = f"{metric_key_prefix}_"
        size = self.args.per_device_eval_batch_size
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        mine = list(range(rank, len(rows), ranks))
        for first in range(0, len(mine), size):
            batch = [rows[i] for i in mine[first : first + size]]
            groups = self._sample(
                batch,
                self.args.eval_num_generations,
                self.args.eval_sampling(),
                self.args.seed + mine[first],
            )
            self._reward(groups, prefix)
        results, self.metrics = self.metrics.drain(self.sum_over_ranks), kept
        self.log(dict(results))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, results
        )
        return results

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add tokens per second (prompts and completions, wall time) to the log line."""
        now = time.perf_counter()
        if "loss" in logs:
            logs["tokens_per_second"] = self._tokens / (now - self._tokens_since)
            self._tokens, self._tokens_since = 0, now
        super().log(logs, start_time)

    # --- construction -------------------------------------------------------------------------

    def _own_engine(self) -> InProcessEngine:
        return InProcessEngine(
            self.model,
            stop_ids=self.stop_ids,
            pad_token_id=self.engine_pad_id,
            autocast_dtype=torch.bfloat16 if self.args.bf16 else None,
        )

    def _save_stop_ids(self) -> None:
        """Write every stop id into the generation config, which is saved with the model."""
        generation_config = getattr(self.model, "generation_config", None)
        if generation_config is not None and self.stop_ids:
            generation_config.eos_token_id = list(self.stop_ids)


def _reward_runner(given: Any, args: OnlineConfig) -> RewardRunner:
    if given is not None and args.reward_functions:
        raise ValueError(
            "reward functions were given twice, as reward_funcs and as args.reward_functions: "
            "leave one of them out"
        )
    if given is None:
        given = [load_reward_function(spec) for spec in args.reward_functions or []]
    return RewardRunner(given, weights=args.reward_weights, timeout=args.reward_timeout)
