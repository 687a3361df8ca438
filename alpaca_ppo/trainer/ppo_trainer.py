"""`PPOTrainer`: one step of PPO as a chain of hooks that a subclass may override, in the order in which they run:
rollout (_generate, _score) -> _shape_reward -> _estimate_advantage -> step_with_rollouts (compute_policy_loss,
compute_value_loss) -> record_step_stats.

The mathematics is in `functional`, the parts of a step in `ppo`, the building of a trainer in `setup`, the loop over
steps, with evaluation, logging and checkpoints, in `base_trainer`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from alpaca_ppo import hook_checks
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.collectives import gather_list, max_over_ranks
from alpaca_ppo.distributed.random_states import kept_random_states
from alpaca_ppo.environments.kinds import EnvironmentFactory
from alpaca_ppo.environments.tool_calls import ToolCallParser
from alpaca_ppo.functional import AdvantageInputs, shape_rewards
from alpaca_ppo.functional.shaping import distill, per_token, sequence_scores
from alpaca_ppo.generation import SamplingParams
from alpaca_ppo.models import ActorCritic, ActorCriticOutputs
from alpaca_ppo.ppo import metrics
from alpaca_ppo.ppo.advantages import estimate_advantages
from alpaca_ppo.ppo.dynamic_sampling import replace_uninformative
from alpaca_ppo.ppo.failed_rewards import leave_out_failures
from alpaca_ppo.ppo.losses import checked_loss, correction_weights, policy_terms
from alpaca_ppo.ppo.metrics import StepRecord, StepStats
from alpaca_ppo.ppo.mismatch import spread_by_length
from alpaca_ppo.ppo.rollouts import RolloutOptions
from alpaca_ppo.ppo.row_masks import advantage_mask, gradient_mask
from alpaca_ppo.ppo.update_plan import plan_updates
from alpaca_ppo.registry import ADV_ESTIMATORS
from alpaca_ppo.rewards.batch import RowFailure
from alpaca_ppo.rewards.build import RewardFunc
from alpaca_ppo.rewards.reward_function import merged
from alpaca_ppo.rewards.scorer import score_responses
from alpaca_ppo.tracking import rollout_tables
from alpaca_ppo.tracking.console import samples_are_due
from alpaca_ppo.trainer import setup
from alpaca_ppo.trainer.base_trainer import BaseTrainer
from alpaca_ppo.trainer.evaluation import Evaluator, Measure
from alpaca_ppo.trainer.inspected_prompts import TrainingPromptInspector, logged_rollouts, token_statistics
from alpaca_ppo.types import PromptBatch, Rollouts


class PPOTrainer(BaseTrainer):
    """Trains a causal language model with PPO and a critic against any reward.

    Args:
        model: the policy: a path or hub id (also of an adapter), a model in memory, trained in place (of a `PeftModel`,
            its adapter), or an `ActorCritic`, which includes its critic.
        reward_funcs: one source or a list: Python functions with TRL's signature, `module:function` names, and
            sequence classifiers (a path, a hub id or a model) with one label. None if environments give all rewards.
        args: the configuration.
        train_dataset: rows with a prompt column, or the columns that `args.prompt_template` names.
        eval_dataset: held-out rows of the same form, for `evaluate`; or several eval sets by name.
        processing_class: the policy's tokenizer; loaded from the model's folder by default.
        value_model: what the critic starts from: the `final/value` folder of a run with the same `critic_layout`, or,
            for a critic with a separate backbone, a sequence classifier with one label or a causal language model of
            any size with the policy's tokenizer. By default a separate critic starts from the policy.
        ref_model: the reference policy; by default chosen by `args.reference`.
        peft_config: a `peft.LoraConfig`: the policy's base is frozen, and adapters are trained.
        reward_processing_classes: the tokenizers of reward models in memory, one or a list as long as `reward_funcs`;
            that of a model in a folder is loaded from there.
        callbacks: `transformers.TrainerCallback`s.
        optimizers: an optimizer over `ActorCritic` parameters and a schedule, each None for the default.
        accelerator: an existing Accelerator; by default one is built from `args`.
        metric_funcs: sources like `reward_funcs` that only measure the responses of evaluations.
        metric_processing_classes: the tokenizers of their models, like `reward_processing_classes`.
        tools: functions that the policy can call, with type hints and Google-style docstrings; sync or async.
        environment_factory: a class or function that makes environments (`environments.kinds`), or several by the names
            in the dataset's column `environment`. Without `train_dataset`, one environment makes the prompts, and
            `max_steps` sets the length.
        tool_call_parser: finds the tool calls in a turn's text (`environments.tool_calls.ToolCallParser`); by default
            the tokenizer's `response_template`, or JSON between <tool_call> tags.

    Attributes:
        args: the configuration.
        accelerator: Accelerate's object for processes and devices.
        processing_class: the policy's tokenizer.
        train_prompts: the tokenized prompts of `train_dataset`.
        eval_prompts: those of each eval set by name, "" for a single one; empty without evaluation.
        schedule: which prompts each step takes, and how many steps there are.
        sampling_params: of training.
        environments: reply to the policy between its turns; None without tools and environments.
        updater: takes the optimizer steps; `updater.engine` holds the models and the optimizer.
        collector: samples, and computes log-probs and values; holds the reference and the reward sources.
        sampler_check: compares sampler and trainer.
        kl_controller: holds the current `kl_coef` and adapts it.
        evaluator: evaluates the policy on `eval_prompts`.
        run_log: metrics.jsonl, trackers and the progress bar.
        run_lock: the lock on the output folder.
        state: transformers' `TrainerState`; `state.global_step` counts completed steps.
        progress: the point from which the run would resume.
        callback_handler: the callbacks and their control flags.
        checkpoints: saves, loads and rotates checkpoints.
        start: what the run started from, for its records.
        step_record: timings and logged numbers of the step in progress.
        last_rollouts: the rollouts of the last step, until the next rollout.

    Raises:
        ValueError: for arguments that cannot work together, and for those of another trainer, with their names here.
    """

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
        given = setup.TrainerArguments(
            model=model, reward_funcs=reward_funcs, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset,
            processing_class=processing_class, value_model=value_model, ref_model=ref_model, peft_config=peft_config,
            reward_processing_classes=reward_processing_classes, callbacks=callbacks, optimizers=optimizers,
            accelerator=accelerator, metric_funcs=metric_funcs, metric_processing_classes=metric_processing_classes,
            tools=tools, environment_factory=environment_factory, tool_call_parser=tool_call_parser,
        )  # fmt: skip
        cls = type(self)
        samples_itself = cls._generate is not PPOTrainer._generate
        scores_itself = cls._score is not PPOTrainer._score
        parts = setup.make_parts(given, cls, samples_itself=samples_itself, scores_itself=scores_itself)
        super().__init__(parts, callbacks or [])
        self.evaluator = Evaluator(parts, self.collect_rollouts)
        self.step_record = setup.make_step_record(self.run_log)

    def step(self, prompt_batches: Sequence[PromptBatch]) -> dict[str, float]:
        """A rollout on this rank's prompts and the update on the global rollouts; returns the step's metrics."""
        step, self.last_rollouts = self.state.global_step, None
        rollouts = self.step_rollouts(prompt_batches)
        rewards, logprobs, mask = rollouts["rewards"], rollouts["logprobs"], rollouts["response_mask"]
        if "teacher_logprobs" in rollouts:
            rewards = distill(rewards, logprobs, rollouts["teacher_logprobs"], mask, self.args.teacher_coef)
        shaped = self._shape_reward(
            rewards=rewards,
            responses=rollouts["responses"],
            logprobs=logprobs,
            ref_logprobs=rollouts["ref_logprobs"],
            response_mask=mask,
        )
        rollouts |= hook_checks.checked("_shape_reward", shaped, rollouts)
        # The hook calls the shaped rewards `rewards`, and those before shaping `scores`.
        estimated = self._estimate_advantage(
            rewards=rollouts["shaped_rewards"],
            values=rollouts.get("values"),
            response_mask=advantage_mask(rollouts),
            scores=rollouts["rewards"],
            prompt_ids=rollouts["prompt_ids"],
            baseline_scores=rollouts.get("baseline_scores"),
            scores_by_source=rollouts["scores_by_source"],
        )
        rollouts |= hook_checks.checked("_estimate_advantage", estimated, rollouts)
        train_stats = self.step_with_rollouts(rollouts)
        return self.record_step_stats(train_stats, rollouts, step + 1)

    def step_rollouts(self, prompt_batches: Sequence[PromptBatch]) -> Rollouts:
        """The global rollouts of a step (`rollout`), after `dynamic_sampling` has replaced uninformative prompts."""
        step = self.state.global_step
        rollouts = hook_checks.check_rollouts(self.rollout(prompt_batches))
        if self.args.dynamic_sampling:
            prompts = self.step_prompts(step)
            rollouts, stats = replace_uninformative(rollouts, prompts, self._redraw, args=self.args)
            self.step_record.redraw_stats = stats
            self.progress.drawn[step] = prompts.extra_prompts
        return rollouts

    def _redraw(self, prompt_ids: Sequence[int], sampling_round: int) -> Rollouts:
        """The global rollouts of dataset indices that `dynamic_sampling` has drawn in a round (from 1)."""
        batches = self.collector.collate(self.train_prompts, prompt_ids, sampling_round=sampling_round)
        return hook_checks.check_rollouts(self.rollout(batches))

    def rollout(self, prompt_batches: Sequence[PromptBatch]) -> Rollouts:
        """Samples responses to this rank's prompts (`_generate`), scores them (`_score`) and computes their log-probs
        and values under policy, critic and reference.

        Returns the rollouts of all ranks, on the CPU, in the prompts' order: the keys of `types.Rollouts` before
        `shaped_rewards`.
        """
        step, args = self.state.global_step, self.args
        self.sampling_params.check_full_softmax()
        sampling_round = max((batch.get("sampling_round", 0) for batch in prompt_batches), default=0)
        recomputes = self.sampler_check.recomputes(step)
        # An override of the hook may change the responses.
        keeps_states = not recomputes and self.collector.keeps_states and type(self)._generate is PPOTrainer._generate
        sampling_params = replace(
            self.sampling_params,
            seed=args.seed,
            step=step,
            sampling_round=sampling_round,
            state_layers=self.actor_critic.layers_read if keeps_states else (),
        )
        options = RolloutOptions(
            with_policy=recomputes,
            with_critic=args.uses_critic,
            with_entropies=metrics.logs_entropies(step),
            greedy_baseline=ADV_ESTIMATORS.trait(args.adv_estimator, "needs_greedy_baseline"),
            compares_group=ADV_ESTIMATORS.trait(args.adv_estimator, "needs_group"),
            may_fail=sampling_round > 0,
        )
        rollouts = self.collect_rollouts(prompt_batches, sampling_params, options, self.step_record)
        self.sampler_check.check_rollouts(rollouts)
        return rollouts

    def collect_rollouts(
        self,
        prompt_batches: Sequence[PromptBatch],
        sampling_params: SamplingParams,
        options: RolloutOptions,
        record: StepRecord,
        measure: Measure | None = None,
    ) -> Rollouts:
        """The global rollouts of a step or an evaluation, from this rank's prompts.

        `record` gets the timings and what reward functions log; `measure` adds tensors to this rank's scored samples.
        """
        n = sampling_params.num_return_sequences
        num_prompts = sum(len(batch["rows"]) - batch.get("num_dummies", 0) for batch in prompt_batches)
        self.collector.sync(can_stop=self.progress.is_current)
        self.updater.cache.begin(self.state.global_step)
        local: dict[str, Tensor] | None = None
        failures: list[RowFailure] = []
        phase = self.run_log.bar.phase("sampling", num_prompts * (n + int(options.greedy_baseline)))
        # After a signal, `preemption.rollout` ends the block early and `local` stays None: `gather` raises everywhere.
        with phase, self.collector.preemption.rollout(can_stop=self.progress.is_current):
            parts: list[dict[str, Tensor]] = []
            for batch in prompt_batches:
                if batch["rows"]:
                    rows, failed = self._local_rollouts(batch, sampling_params, options, record, measure)
                    failures += failed
                    if len(rows["responses"]):
                        parts.append(rows)
            local = {key: torch.cat([part[key] for part in parts]) for key in parts[0]} if parts else {}
        rollouts = self.collector.gather(local, samples_per_prompt=n)
        if "trained_rows" in rollouts:
            report = leave_out_failures(
                rollouts, failures, self.accelerator, compares_group=options.compares_group, may_fail=options.may_fail
            )
            if report:
                self.run_log.message(report)
        record.logged = merged([record.logged, *gather_list(self.collector.scorer.logged.pop(), self.accelerator)])
        return rollouts

    def _local_rollouts(
        self,
        prompts: PromptBatch,
        sampling_params: SamplingParams,
        options: RolloutOptions,
        record: StepRecord,
        measure: Measure | None,
    ) -> tuple[dict[str, Tensor], list[RowFailure]]:
        """The samples of a batch of this rank with scores, log-probs and values; and the rewards that failed. Those of
        dummies are left out.
        """
        n = sampling_params.num_return_sequences
        rows = self._sample_and_score(prompts, sampling_params, record, measure)
        if options.greedy_baseline:
            greedy = replace(sampling_params, do_sample=False, num_return_sequences=1, state_layers=())
            baseline = self._sample_and_score(prompts, greedy, record, measure)
            rows["baseline_scores"] = sequence_scores(baseline["rewards"]).repeat_interleave(n)
            if "trained_rows" in rows:
                rows["trained_rows"] = rows["trained_rows"] & baseline["trained_rows"].repeat_interleave(n)
        with record.measure("logprobs"):
            rows |= self.collector.forward(rows, options, temperature=sampling_params.temperature)
        count = (len(prompts["rows"]) - prompts.get("num_dummies", 0)) * n
        failures = [failure for failure in self.collector.scorer.pop_failures() if (failure.row or 0) < count]
        return {key: value[:count] for key, value in rows.items()}, failures

    def _sample_and_score(
        self, prompts: PromptBatch, sampling_params: SamplingParams, record: StepRecord, measure: Measure | None = None
    ) -> dict[str, Tensor]:
        """Checked samples of this rank's prompts with their scores, on the CPU."""
        rows = [row for row in prompts["rows"] for _ in range(sampling_params.num_return_sequences)]
        with ExitStack() as stack:
            if self.environments is not None:
                begin = self.environments.episodes(prompts, sampling_params, self.collector.preemption.poll)
                with record.measure("environments"):
                    episodes = stack.enter_context(begin)
                rows, sampling_params = episodes.rows, episodes.sampling_params
                prompts = {**episodes.prompts, "episodes": episodes}
            with record.measure("rollout"):
                samples = self._generate(prompts, sampling_params)
            samples = hook_checks.complete_samples(samples, prompts, sampling_params)
            self.collector.preemption.poll()
            with record.measure("score"):
                scores = self._score(samples, rows)
                scored = hook_checks.check_scores(scores, samples, num_sources=len(self.collector.scorer.names))
                samples = samples | scored
                return samples if measure is None else samples | measure(samples, rows)

    def _generate(self, prompts: PromptBatch, sampling_params: SamplingParams) -> dict[str, Tensor]:
        """Samples `sampling_params.num_return_sequences` (n) responses to each of this rank's P prompts.

        Override it to sample with another engine. The random numbers of a response depend on its key alone
        (`sampling_params.random_keys(prompts["prompt_ids"])`), so that a run does not depend on batches or ranks.

        Args:
            prompts: token ids, left-padded, with the dataset's rows.
            sampling_params: lengths, temperature, stop tokens, and the seed and step of the random numbers.

        Returns:
            tensors on the CPU with P * n rows, those of a prompt next to one another: `responses` (P * n, R) int64 with
            R = max_new_tokens; `response_mask` (P * n, R) bool, True = a token that the policy chose (holes are
            allowed); `rollout_logprobs` (P * n, R) float, the chosen tokens' log-probs in nats; `stopped` (P * n,)
            bool. Also `queries` and `query_attn_masks` (P * n, Q) if the hook changed a sample's prompt, and any other
            tensors with one entry per row, which `_score` and the later hooks get too.
        """
        with self.run_log.bar.phase("sampling") as count_rows:
            return self.collector.sample(prompts, sampling_params, count_rows)

    def _score(self, samples: dict[str, Tensor], rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Scores finished responses with the run's reward sources.

        Args:
            samples: of C responses: what `_generate` returned, checked, with `queries`, `query_attn_masks`,
                `prompt_ids` and `sample_ids`.
            rows: the dataset's row of each response.

        Returns:
            `scores` (C,) float32, before any penalty; `rewards` (C,), or (C, R) with each token's reward in the column
            of the token; `scores_by_source` (C, sources); `overlong_penalties` and `trained_rows` where they apply.
        """
        scored = score_responses(self.collector.scorer, self.processing_class, samples, rows, self.args)
        if self.environments is not None and self.environments.reward_per_token:
            scored["rewards"] = per_token(scored["rewards"], samples["response_mask"])
        return scored

    def _shape_reward(
        self, rewards: Tensor, responses: Tensor, logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor
    ) -> dict[str, Tensor]:
        """Adds the KL penalty (`kl_coef`) to (B,) or (B, R) rewards; returns `shaped_rewards`, `non_score_rewards` and
        `kl`, (B, R) each.
        """
        coef, estimator = self.kl_controller.value, self.args.kl_estimator
        shaped = shape_rewards(rewards, logprobs, ref_logprobs, response_mask, kl_coef=coef, kl_estimator=estimator)
        return shaped._asdict()

    def _estimate_advantage(
        self, rewards: Tensor, values: Tensor | None, response_mask: Tensor, **extra: Any
    ) -> dict[str, Tensor]:
        """`advantages` and `returns` (B, R) of shaped rewards (B, R) and values (B, R; None without a critic).

        `extra` holds `scores` (B,) or (B, R), the rewards before shaping, `prompt_ids` (B,), `baseline_scores` (B,) or
        None, and `scores_by_source` (B, sources), for estimators that need them.
        """
        inputs = AdvantageInputs(rewards, values, response_mask, critic_pretraining=self.in_critic_pretraining, **extra)
        return estimate_advantages(inputs, self.args)._asdict()

    def step_with_rollouts(self, rollouts: Rollouts) -> dict[str, float]:
        """Takes the optimizer steps on the global rollouts (`ppo.update_plan`); returns the statistics of all ranks.

        Optimizer steps of which no row gives a gradient (`ppo.row_masks`) are left out, and counted. Those that
        remain when the KL exceeds `target_kl_stop` are not taken. Raises a SamplerMismatch, or as `_record_skip` does.

        Counts the step, so that the next `rollout` uses new random numbers.
        """
        step, stats = self.state.global_step, StepStats()
        rollouts.update(correction_weights(rollouts, self.args))  # type: ignore[typeddict-item]
        planned = plan_updates(len(rollouts["responses"]), self.args, step, critic_only=self.in_critic_pretraining)
        # With a gradient of 0, momentum and weight decay would still move the weights.
        gives_gradient = gradient_mask(rollouts, self.args).any(dim=1)
        plan = [update for update in planned if gives_gradient[update.rows].any()]
        stats.empty_updates = len(planned) - len(plan)
        with self.step_record.measure("update", len(plan)) as count_updates:
            for update in plan:
                count_updates(1)
                for batch in self.updater.micro_batches(rollouts, update):
                    stats.add(self.updater.backward(batch, self.compute_policy_loss, self.compute_value_loss))
                applied = self.updater.apply(update, stats, check=self.sampler_check.check)
                if applied.fault is not None:
                    self._record_skip(applied.fault, rollouts["prompt_ids"][update.rows].tolist())
                if applied.stopped:
                    break
            train_stats = stats.reduce(self.accelerator, with_critic=self.actor_critic.critic is not None)
        self.updater.warn_outside_support(train_stats)
        self.progress.count_step(step)
        return train_stats

    def compute_policy_loss(self, batch: Rollouts, outputs: ActorCriticOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and statistics of the policy in one micro-batch, on the device: policy gradient, successes, KL, entropy.

        The loss is a masked sum divided by `batch["denominator"]`. Losses, and statistics named `loss/*`, therefore add
        up over the micro-batches of an optimizer step. Statistics named `*_min` and `*_max` are extremes, all others
        means over the micro-batch's response tokens.
        """
        return policy_terms(batch, outputs, self.args)

    def compute_value_loss(self, batch: Rollouts, outputs: ActorCriticOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and statistics of the critic in one micro-batch: the loss of its head (`models.critic_heads`) times
        `vf_coef`. If the critic shares no activations with the policy, it has a separate backward pass, and `outputs`
        has the critic's part only.
        """
        assert self.actor_critic.critic is not None and outputs.predictions is not None
        head = self.actor_critic.critic.head
        value = checked_loss(f"loss of the critic {head.kind!r}", head.loss(outputs.predictions, batch, self.args))
        stats = {"loss/value": value.loss} | {f"val/{name}": stat for name, stat in value.stats.items()}
        return self.args.vf_coef * value.loss, {name: stat.detach() for name, stat in stats.items()}

    def record_step_stats(self, train_stats: dict[str, float], rollouts: Rollouts, step: int) -> dict[str, float]:
        """The metrics of `step` (from 1) as a flat dictionary, with AlpacaFarm's names if it has them. Also updates
        `kl_coef` for the next step (`kl_controller`), keeps `last_rollouts` and begins a new `step_record`.
        """
        record, self.step_record = self.step_record, setup.make_step_record(self.run_log)
        self.last_rollouts = rollouts
        local = {**record.seconds, "memory/peak_gib": metrics.peak_memory_gib(self.accelerator.device)}
        stats = {
            "objective/kl_coef": self.kl_controller.value,
            **self.updater.learning_rates.stats(),
            **metrics.throughput_stats(rollouts, max_over_ranks(local, self.accelerator)),
            **metrics.advantage_stats(rollouts, self.args),
            **metrics.objective_stats(rollouts, source_names=self.collector.scorer.names),
            **self.sampler_check.stats(rollouts),
            **record.logged_means(),
            **record.redraw_stats,
            **{name if name.startswith("mismatch/") else f"ppo/{name}": v for name, v in train_stats.items()},
        }
        # While the policy is frozen, its KL says nothing about `kl_coef`.
        if step > self.args.critic_pretraining_steps:
            kl = float(rollouts["kl"].sum(dim=1).mean())
            scores_std = stats["objective/scores_std"]
            self.kl_controller.update(kl, num_sequences=len(rollouts["responses"]), scores_std=scores_std)
        return stats

    @property
    def in_critic_pretraining(self) -> bool:
        """Whether this step trains the critic alone, on Monte-Carlo returns."""
        return self.state.global_step < self.args.critic_pretraining_steps

    def _record_skip(self, cause: str, prompt_ids: list[int]) -> None:
        """Counts and logs a skipped optimizer step.

        Raises:
            FloatingPointError: when more than `max_skipped_updates` were skipped, counting those before a resumption.
        """
        self.progress.skipped_updates += 1
        number, limit = self.progress.skipped_updates, self.args.max_skipped_updates
        step = self.state.global_step + 1
        skipped = {"number": number, "step": step, "cause": cause, "prompt_ids": prompt_ids}
        self.run_log.append("skipped_updates", skipped)
        text = (
            f"step {step}: {cause}: the update was skipped and the weights are unchanged (prompts {prompt_ids}); "
            f"{number} updates in this run had a non-finite loss or gradient, max_skipped_updates is {limit}"
        )
        if number > limit:
            raise FloatingPointError(f"{text}; to continue, raise it and resume from the last checkpoint")
        self.run_log.message(text)

    def check_sampler(self) -> None:
        """Compares sampler and trainer on short responses to at most 4 of the next step's prompts, of lengths as
        different as possible. Does nothing if environments make the prompts, or `rollout` or `_generate` is overridden.

        Raises:
            ValueError: if they disagree and `mismatch_action` is stop.
        """
        cls = type(self)
        inherited = cls.rollout is PPOTrainer.rollout and cls._generate is PPOTrainer._generate
        if self.sampler_check.compares and inherited and not self.train_prompts.any_blank:
            ids = self.step_prompts(self.state.global_step).indices[:16]
            items = [self.train_prompts[i] for i in ids]
            chosen = spread_by_length([len(item["input_ids"]) for item in items], count=4)
            prompts = self.collector.prompt_batch([items[i] for i in chosen], [ids[i] for i in chosen])
            self.sampler_check.before_training(prompts, self.sampling_params)

    def log_rollouts(self) -> None:
        step, rollouts = self.state.global_step, self.last_rollouts
        if rollouts is not None and self.args.num_logged_rollouts:
            rows = logged_rollouts(self.collector, self.processing_class, rollouts, step)
            rollout_tables.add_columns(rows, self.train_prompts, self.args.prompt_column)
            self.run_log.log_table("rollouts", rows, step)
        if rollouts is not None and samples_are_due(step):
            self.run_log.samples = rollout_tables.sample_rows(rollouts, self.processing_class)

    def built_in_callbacks(self) -> list[TrainerCallback]:
        """Also the one that answers training prompts for the report's inspector."""
        callbacks = super().built_in_callbacks()
        if self.args.num_inspected_prompts and not self.eval_prompts and self.environments is None:
            callbacks.insert(0, TrainingPromptInspector(self._inspect_training_prompts))
        return callbacks

    def _inspect_training_prompts(self, step: int) -> None:
        """Writes the table of the policy's greedy answers to the first `num_inspected_prompts` training prompts.

        They are not scored, since a reward function may count its calls or cost money. The global random generators are
        restored.
        """
        ids = range(min(self.args.num_inspected_prompts, len(self.train_prompts)))
        batch = self.collector.prompt_batch([self.train_prompts[i] for i in ids], ids)
        params = replace(self.sampling_params, do_sample=False, num_return_sequences=1)
        rollouts: Any = None
        # A signal ends the block, and `poll` then raises on every rank.
        with kept_random_states(), self.collector.preemption.rollout(can_stop=self.progress.is_current):
            samples = hook_checks.complete_samples(self._generate(batch, params), batch, params)
            unscored = {"scores": torch.full((len(ids),), torch.nan)}
            rollouts = samples | token_statistics(self.collector, samples) | unscored
        self.poll()
        rows = rollout_tables.rollout_rows(rollouts, self.processing_class)
        rollout_tables.add_columns(rows, self.train_prompts, self.args.prompt_column)
        self.run_log.log_table("inspected", rows, step)
