"""`PPOTrainer`: one step of PPO as hooks to override: rollout -> _shape_reward -> _estimate_advantage ->
step_with_rollouts.

The mathematics is in `functional`, the parts of a step in `ppo`. The hooks within `rollout`, `_generate` and `_score`,
are in `rollout_trainer`; the loop over steps, with logging and checkpoints, is in `base_trainer`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from alpaca_ppo.checkpoint.compatibility import start_identity
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.accelerator import make_accelerator
from alpaca_ppo.distributed.collectives import max_over_ranks
from alpaca_ppo.environments.kinds import EnvironmentFactory
from alpaca_ppo.environments.tool_calls import ToolCallParser
from alpaca_ppo.functional import AdvantageInputs, shape_rewards
from alpaca_ppo.models import ActorCritic, ActorCriticOutputs, CriticHead, factory
from alpaca_ppo.models.loading import load_processing_class
from alpaca_ppo.ppo import hook_checks, metrics
from alpaca_ppo.ppo.advantages import estimate_advantages
from alpaca_ppo.ppo.agreements import agree_on_backend, agree_on_padding
from alpaca_ppo.ppo.device_rows import row_tensors
from alpaca_ppo.ppo.losses import correction_weights, loss_terms, sample_value_taus
from alpaca_ppo.ppo.metrics import RolloutCounts
from alpaca_ppo.ppo.minibatches import update_steps
from alpaca_ppo.ppo.mismatch import MismatchGuard
from alpaca_ppo.ppo.old_policy import OldPolicySource
from alpaca_ppo.ppo.trained_rows import compared_mask
from alpaca_ppo.ppo.updates import make_updater
from alpaca_ppo.tracking import rollout_tables
from alpaca_ppo.tracking.console import samples_are_due
from alpaca_ppo.tracking.run_record import RunRecord
from alpaca_ppo.trainer import setup
from alpaca_ppo.trainer.environment_setup import GivenEnvironments, check_sampler, make_environments
from alpaca_ppo.trainer.evaluation import Evaluator
from alpaca_ppo.trainer.inspected_prompts import logged_rollouts
from alpaca_ppo.trainer.preflight import (
    DiskCheck,
    check_config_class,
    check_output_dir,
)
from alpaca_ppo.trainer.progress import UpdateProgress
from alpaca_ppo.trainer.rollout_trainer import RolloutTrainer
from alpaca_ppo.types import PromptBatch, Rollouts

RewardFunc = str | PreTrainedModel | Callable[..., Any]


class PPOTrainer(RolloutTrainer):
    """Trains a causal language model with PPO and a critic against any reward.

    Args:
        model: the policy: a path or hub id (of an adapter too), a model in memory, trained in place (for a `PeftModel`,
            its adapter is trained further), or an `ActorCritic`, which includes its critic.
        reward_funcs: one source or a list: python functions with TRL's signature, `module:function` names, and
            sequence classifiers (a path, a hub id or a model) with one label. None if environments give all rewards.
        args: the configuration.
        train_dataset: rows with a prompt column, or the columns that `args.prompt_template` names.
        eval_dataset: held-out rows of the same form, for `evaluate`; or several eval sets by name.
        processing_class: the policy's tokenizer; loaded from the model's folder by default.
        value_model: what the critic starts from, by default the policy: the `final/value` folder of a run with the same
            `critic_layout`, or, for a critic with a backbone of its own, a sequence classifier with one label or a
            causal language model of any size with the policy's tokenizer.
        ref_model: the reference policy; by default chosen by `args.reference`.
        peft_config: a `peft.LoraConfig`: the policy's base is frozen, and adapters are trained.
        reward_processing_classes: the tokenizers of reward models that were built in memory, one or a list as long as
            `reward_funcs`; for a model from a folder it is loaded from there.
        callbacks: `transformers.TrainerCallback`s.
        optimizers: an optimizer over `ActorCritic` parameters and a schedule, each None for the default.
        accelerator: an existing Accelerator; by default one is built from `args`.
        metric_funcs: sources like those of `reward_funcs` that only measure the responses of evaluations.
        metric_processing_classes: the tokenizers of their models, like `reward_processing_classes`.
        tools: functions that the policy can call, with type hints and Google-style docstrings; sync or async.
        environment_factory: a class, or a function, that makes environments, or several by the names in the dataset's
            column `environment`. `environments.kinds` says what an environment is. Without `train_dataset`, one
            environment makes the prompts, and `max_steps` sets the length.
        tool_call_parser: finds the tool calls in a turn's text (`environments.tool_calls.ToolCallParser`); by default
            the tokenizer's `response_template`, or JSON between <tool_call> tags.

    Raises:
        ValueError: for arguments that cannot work together, and for those of another trainer, with what they are here.
    """

    separate_critic_backward = True
    """Whether `compute_loss` runs the critic's backward pass itself, before the policy's forward pass, which saves
    memory if the two share no activations. An override may add terms to what `super().compute_loss` returns; one that
    scales it, or couples policy and critic in another way, must set this to False (a scaled loss raises an error)."""

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel | ActorCritic,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        args: PPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        processing_class: Any = None,
        value_model: str | PreTrainedModel | None = None,
        ref_model: str | PreTrainedModel | PeftModel | None = None,
        peft_config: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        accelerator: Accelerator | None = None,
        metric_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        metric_processing_classes: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None = None,
        tool_call_parser: ToolCallParser | None = None,
    ) -> None:
        given = dict(locals())
        args = check_config_class(args)
        check_output_dir(args)
        environments = GivenEnvironments(tools, environment_factory, tool_call_parser)
        self._check_measures(args, train_dataset, eval_dataset, reward_funcs, metric_funcs, environments)
        start = factory.first_reward_model(reward_funcs) if args.init_value_with_reward else value_model
        self.disk_check = DiskCheck(args, model, start, peft_config, adamw=optimizers[0] is None)
        self.args, self.run_record = args, RunRecord.of_objects(type(self), given)
        self.accelerator = make_accelerator(args, accelerator)
        self.processing_class = processing_class or load_processing_class(
            model, trust_remote_code=args.trust_remote_code
        )
        self.train_prompts = setup.make_prompts(train_dataset, self.processing_class, args, environments)
        setup.report_plain_text(self.train_prompts, self.processing_class, self.accelerator)
        self.eval_prompts = setup.make_eval_prompts(eval_dataset, self.processing_class, args, environments)
        self.schedule = setup.make_schedule(len(self.train_prompts), args)
        device = self.accelerator.device
        scorer = setup.make_scorer(reward_funcs, reward_processing_classes, args, device, environments)
        metric_scorer = setup.make_metric_scorer(metric_funcs, metric_processing_classes, args, device)
        actor_critic = factory.make_actor_critic(model, value_model, reward_funcs, peft_config, args)
        setup.check_critic_tokenizer(start, self.processing_class, args)
        chat = any(prompts.are_messages for prompts in (self.train_prompts, *self.eval_prompts.values()))
        self.sampling_params = setup.make_sampling_params(
            actor_critic, self.processing_class, args, chat=chat, accelerator=self.accelerator
        )
        setup.add_reward_adapter(scorer, actor_critic, args, device)
        self.environments = make_environments(
            environments, self.processing_class, self.sampling_params, scorer, args, messages=chat
        )
        reference = factory.make_reference(actor_critic, ref_model, args)
        self.start_identity = start_identity(actor_critic, reference, scorer, self.environments)
        self.collector = setup.make_collector(reference, scorer, metric_scorer, self.accelerator, args)
        self.padding = agree_on_padding(actor_critic, reference, self.accelerator)
        self.updater = make_updater(self.accelerator, actor_critic, *optimizers, args=args, schedule=self.schedule)
        self.sampling_params = agree_on_backend(self.sampling_params, self.updater.engine)
        self.has_own_schedule = optimizers[1] is not None
        self._set_up_steps(has_reference=reference is not None)
        self.set_up_run(callbacks or [])

    def _set_up_steps(self, *, has_reference: bool) -> None:
        """Evaluation, and what decides from step to step: the sampler's check, critic pretraining, the old policy, the
        KL penalty.
        """
        args = self.args
        check_sampler(self.environments, self.sampling_params, self.updater.engine)
        self.collector.prepare_frozen_models(self.updater.engine)
        self.evaluator = Evaluator(self, self.collector.metric_scorer)
        self.mismatch_guard = MismatchGuard(self.updater.engine, args)

        def report(text: str) -> None:
            self.run_log.message(text)

        self.critic_pretraining = setup.make_critic_pretraining(self.updater, self.schedule, args, report=report)
        self.old_policy = OldPolicySource(
            self.mismatch_guard,
            args,
            self.critic_pretraining,
            has_reference=has_reference,
            report=report,
            sampler_repeats=self.environments is None or not self.environments.answer,
        )
        self.kl_controller = setup.make_kl_controller(args)

    def step(self, prompt_batches: Sequence[PromptBatch]) -> dict[str, float]:
        """One rollout on this rank's prompts and the updates on the global batch; returns the step's metrics.

        A run that is resumed in the middle of a step's update continues with the rollouts stored in the checkpoint.
        """
        self.run_lock.acquire()
        self.timers, self.counts = self.new_timers(), RolloutCounts()
        step, update = self.state.global_step, self.progress.pop_resumed_update()
        if update is None:
            rollouts = self._rollouts_with_advantages(prompt_batches)
            self.progress.advance(update=UpdateProgress(rollouts, self.timers.seconds, self.counts))
        else:
            rollouts, self.timers.seconds, self.counts = update.rollouts, update.seconds, update.counts
        with self.timers.measure("update"):
            train_stats = self.step_with_rollouts(rollouts)
        self.mark_step_done(step)
        stats = self.record_step_stats(train_stats, rollouts, step + 1)
        # A controller holds the KL of a policy that moves near its target, and a frozen one does not move.
        if not self.critic_pretraining.includes(step):
            kl = float(rollouts["kl"].sum(dim=1).mean())
            self.kl_controller.update(kl, num_sequences=rollouts["responses"].size(0))
        return stats

    def _rollouts_with_advantages(self, prompt_batches: Sequence[PromptBatch]) -> Rollouts:
        """The global rollouts with shaped rewards, advantages and returns."""
        rollouts = self.step_rollouts(prompt_batches)
        shaped = self._shape_reward(
            rewards=rollouts["rewards"],
            responses=rollouts["responses"],
            logprobs=rollouts["logprobs"],
            ref_logprobs=rollouts["ref_logprobs"],
            response_mask=rollouts["response_mask"],
        )
        hook_checks.add_to_rollouts(rollouts, "_shape_reward", shaped, hook_checks.SHAPED)
        estimated = self._estimate_advantage(
            rewards=rollouts["shaped_rewards"],
            values=rollouts.get("values"),
            response_mask=compared_mask(rollouts),
            scores=rollouts["rewards"],
            prompt_ids=rollouts["prompt_ids"],
            baseline_scores=rollouts.get("baseline_scores"),
            scores_by_source=rollouts["scores_by_source"],
        )
        hook_checks.add_to_rollouts(rollouts, "_estimate_advantage", estimated, hook_checks.ESTIMATED)
        return rollouts

    def _shape_reward(
        self, rewards: Tensor, responses: Tensor, logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor
    ) -> dict[str, Tensor]:
        """Turns (B,) or (B, R) rewards into `shaped_rewards` by adding the KL penalty (if `use_kl_in_reward`); also
        returns `non_score_rewards` and `kl`. All are (B, R).
        """
        return shape_rewards(
            rewards,
            logprobs,
            ref_logprobs,
            response_mask,
            kl_coef=self.kl_controller.value if self.args.use_kl_in_reward else 0.0,
            kl_estimator=self.args.kl_estimator,
        )._asdict()

    def _estimate_advantage(
        self, rewards: Tensor, values: Tensor | None, response_mask: Tensor, **extra: Any
    ) -> dict[str, Tensor]:
        """`advantages` and `returns` (B, R) of shaped rewards (B, R) and values (B, R; None without a critic).

        `extra` holds `scores` (B,) or (B, R), the rewards before shaping, `prompt_ids` (B,), `baseline_scores` (B,) or
        None, and `scores_by_source` (B, sources), for estimators that need them.
        """
        inputs = AdvantageInputs(
            rewards=rewards,
            values=values,
            response_mask=response_mask,
            scores=extra.get("scores"),
            prompt_ids=extra.get("prompt_ids"),
            baseline_scores=extra.get("baseline_scores"),
            scores_by_source=extra.get("scores_by_source"),
        )
        return estimate_advantages(inputs, self.args, monte_carlo_returns=self.in_critic_pretraining)._asdict()

    def step_with_rollouts(self, rollouts: Rollouts) -> dict[str, float]:
        """The optimizer steps on the global rollouts (`ppo.minibatches.update_steps`); returns the statistics of all
        ranks.

        Marks the step as done (`mark_step_done`), so that the next `rollout` of a custom loop uses new random numbers.
        """
        step, args = self.state.global_step, self.args
        self.old_policy.check_rollouts(rollouts, step)
        rollouts.update(correction_weights(rollouts, args))  # type: ignore[typeddict-item]
        update = self.progress.update_for(rollouts)
        rows, key = rollouts["responses"].size(0), (args.seed, step)
        plan = list(update_steps(rows, args, key, critic_only=self.in_critic_pretraining))
        with self.run_log.bar.phase("update", len(plan), update.num_attempted) as count_steps:
            for part, epoch, batch in plan[update.num_attempted :]:
                if update.kl_stopped:
                    break
                count_steps(1)
                try:
                    stats, stepped = self.updater.step(
                        rollouts,
                        batch,
                        self.compute_loss,
                        policy_unchanged=update.policy_steps == 0,
                        part=part,
                        value_taus=sample_value_taus(self.critic_head, *key, epoch, update.num_attempted),
                        target_kl_stop=args.target_kl_stop,
                        check_first=self.old_policy.check_first(rollouts, step),
                        poll=self.poll,
                        message=self.run_log.message,
                    )
                    update.add(part, stats, stepped=stepped)
                    self.old_policy.record_optimizer_step(step, moved_policy=self.updater.moved_policy)
                except hook_checks.NonFiniteUpdate as error:
                    self.skip_update(error)
                    update.skipped += 1
                if update is self.progress.update:
                    self.progress.advance()
        train_stats = update.train_stats(self.accelerator, with_critic=self.critic_head is not None)
        self.updater.warn(train_stats)
        self.critic_pretraining.end_step(step, rollouts)
        self.mark_step_done(step)
        return train_stats

    def skip_update(self, error: hook_checks.NonFiniteUpdate) -> None:
        """Counts and logs a skipped optimizer step. The count covers the whole run, including the time before a resume.

        Raises:
            FloatingPointError: when more than `max_skipped_updates` have been skipped in total.
        """
        self.progress.skipped_updates += 1
        number, step = self.progress.skipped_updates, self.state.global_step + 1
        self.run_log.append(
            "skipped_updates", {"number": number, "step": step, "cause": error.cause, "prompt_ids": error.prompt_ids}
        )
        limit = (
            f"{number} updates in this run had a non-finite loss or gradient; max_skipped_updates is "
            f"{self.args.max_skipped_updates}"
        )
        if number > self.args.max_skipped_updates:
            raise FloatingPointError(
                f"step {step}: {error}. {limit}; to continue, raise max_skipped_updates and resume "
                "from the last checkpoint"
            ) from error
        self.run_log.message(f"step {step}: {error}. {limit}")

    @property
    def critic_head(self) -> CriticHead | None:
        """The head of the critic, however the model is wrapped; None without a critic."""
        critic = self.actor_critic.critic
        return None if critic is None else critic.head

    @property
    def in_critic_pretraining(self) -> bool:
        """Whether this step trains the critic alone, on Monte-Carlo returns."""
        return self.critic_pretraining.includes(self.state.global_step)

    def compute_loss(self, rollouts_batch: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and detached statistics of one micro-batch, on the device.

        The loss is this micro-batch's part of the optimizer step's loss: a masked sum divided by
        `rollouts_batch["denominator"]`, so that the parts add up. Statistics named `loss/*` add up in the same way,
        `*_min` and `*_max` are extremes, all others means over the micro-batch's masked tokens.

        With `separate_critic_backward`, the backward pass of a critic that shares no activations with the policy is
        run inside this method, and its part of the returned loss is detached from the critic.
        """
        separate = self.separate_critic_backward and self.updater.separate_backward
        entropies = self.args.entropy_coef > 0 or metrics.logs_entropies(self.state.global_step, self.args)
        terms = loss_terms(
            partial(self._forward, rollouts_batch, with_entropies=entropies),
            rollouts_batch,
            self.args,
            head=self.critic_head,
            with_policy=self.updater.part != "critic",
            with_critic=self.updater.part != "policy",
            critic_backward_first=self.updater.critic_backward_first if separate else None,
        )
        loss = torch.stack([term for term, _ in terms]).sum()
        stats = {name: stat.detach() for _, part in terms for name, stat in part.items()}
        return loss, {**stats, "loss/total": loss.detach()}

    def _forward(self, batch: Any, **parts: bool) -> ActorCriticOutputs:
        outputs: ActorCriticOutputs = self.model(
            *row_tensors(batch).values(),
            value_taus=batch.get("value_taus"),
            temperature=self.args.temperature,
            chunk_size=self.args.logprob_chunk_size,
            packed=self.updater.packed(batch),
            **parts,
        )
        return outputs

    def record_step_stats(self, train_stats: dict[str, float], rollouts: Rollouts, step: int) -> dict[str, float]:
        """The metrics of `step` (from 1) as a flat dictionary, with AlpacaFarm's names if it has them."""
        stats = {
            "objective/kl_coef": self.kl_controller.value if self.args.use_kl_in_reward else 0.0,
            **self.updater.learning_rates.stats(),
            **metrics.objective_stats(rollouts, source_names=self.collector.scorer.names),
            **metrics.advantage_stats(rollouts, self.args),
            **self.old_policy.stats(rollouts),
            **self._pop_counts().stats(self.args),
            **{name if name.startswith("mismatch/") else f"ppo/{name}": v for name, v in train_stats.items()},
        }
        local = {**self.timers.seconds, "memory/peak_gib": metrics.peak_memory_gib(self.accelerator.device)}
        stats |= metrics.throughput_stats(rollouts, max_over_ranks(local, self.accelerator))
        if self.args.num_logged_rollouts:
            self.run_log.write_rows("rollouts", logged_rollouts(self, rollouts, step), step)
        if samples_are_due(step, self.args):
            self.run_log.samples = rollout_tables.sample_rows(rollouts, self.processing_class)
        return stats
