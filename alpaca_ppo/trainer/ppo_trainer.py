"""`PPOTrainer`: one step of PPO as hooks to override: rollout -> _shape_reward -> _estimate_advantage ->
step_with_rollouts.

The mathematics is in `functional`, the parts of a step in `ppo`, sampling in `generation`. The loop over steps, with
evaluation, logging and checkpoints, is in `base_trainer`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
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
from alpaca_ppo.distributed.preemption import RolloutPoll
from alpaca_ppo.functional import AdvantageInputs, shape_rewards
from alpaca_ppo.functional.shaping import sequence_scores
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.models import ActorCritic, ActorCriticOutputs, CriticHead, factory
from alpaca_ppo.models.loading import load_processing_class
from alpaca_ppo.ppo import hook_checks, metrics
from alpaca_ppo.ppo.advantages import estimate_advantages, rollout_passes
from alpaca_ppo.ppo.agreements import agree_on_backend, agree_on_padding
from alpaca_ppo.ppo.dropped_rows import add_baseline
from alpaca_ppo.ppo.dynamic_sampling import replace_uninformative
from alpaca_ppo.ppo.losses import correction_weights, loss_terms, sample_value_taus
from alpaca_ppo.ppo.metrics import RolloutCounts
from alpaca_ppo.ppo.minibatches import update_steps
from alpaca_ppo.ppo.mismatch import MismatchGuard
from alpaca_ppo.ppo.old_policy import OldPolicySource
from alpaca_ppo.ppo.rollouts import RolloutPasses
from alpaca_ppo.ppo.updates import make_updater
from alpaca_ppo.registry import GENERATION_BACKENDS
from alpaca_ppo.rewards.early_calls import EarlyCalls
from alpaca_ppo.rewards.scoring import early_calls, score_responses
from alpaca_ppo.tracking import rollout_tables
from alpaca_ppo.trainer import setup
from alpaca_ppo.trainer.base_trainer import BaseTrainer
from alpaca_ppo.trainer.preflight import DiskCheck, check_class, check_output_dir
from alpaca_ppo.trainer.progress import UpdateProgress
from alpaca_ppo.types import PromptBatch, Rollouts

RewardFunc = str | PreTrainedModel | Callable[..., Any]


class PPOTrainer(BaseTrainer):
    """Trains a causal language model with PPO and a critic against any reward.

    Args:
        model: the policy: a path or hub id (of an adapter too), a model in memory, trained in place (for a `PeftModel`,
            its adapter is trained further), or an `ActorCritic`, which includes its critic.
        reward_funcs: one source or a list: python functions with TRL's signature, `module:function` names, and
            sequence classifiers (a path, a hub id or a model) with one label.
        args: the configuration.
        train_dataset: rows with a prompt column, or the columns that `args.prompt_template` names.
        eval_dataset: held-out rows of the same form, for `evaluate`.
        processing_class: the policy's tokenizer; loaded from the model's folder by default.
        value_model: what the critic starts from: the `final/value` folder of a run with the same `critic_layout`, or,
            for a critic with a backbone of its own, a sequence classifier with one label.
        ref_model: the reference policy; by default chosen by `args.reference`.
        peft_config: a `peft.LoraConfig`: the policy's base is frozen, and adapters are trained.
        reward_processing_classes: the tokenizers of reward models that were built in memory, one or a list as long as
            `reward_funcs`; for a model from a folder it is loaded from there.
        callbacks: `transformers.TrainerCallback`s.
        optimizers: an optimizer over `ActorCritic` parameters and a schedule, each None for the default.
        accelerator: an existing Accelerator; by default one is built from `args`.

    Raises:
        ValueError: for arguments that cannot work together.
    """

    separate_critic_backward = True
    """Whether `compute_loss` runs the critic's backward pass itself, before the policy's forward pass, which saves
    memory if the two share no activations. An override may add terms to what `super().compute_loss` returns; one that
    scales it, or couples policy and critic in another way, must set this to False (a scaled loss raises an error)."""

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel | ActorCritic,
        reward_funcs: RewardFunc | Sequence[RewardFunc],
        args: PPOConfig,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        processing_class: Any = None,
        value_model: str | PreTrainedModel | None = None,
        ref_model: str | PreTrainedModel | PeftModel | None = None,
        peft_config: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        accelerator: Accelerator | None = None,
    ) -> None:
        check_class(type(self))
        check_output_dir(args)
        start = factory.first_reward_model(reward_funcs) if args.init_value_with_reward else value_model
        self.disk_check = DiskCheck(args, model, start, peft_config, adamw=optimizers[0] is None)
        self.args = args
        self.accelerator = make_accelerator(args, accelerator)
        self.processing_class = processing_class or load_processing_class(
            model, trust_remote_code=args.trust_remote_code
        )
        self.train_prompts = setup.make_prompts(train_dataset, self.processing_class, args)
        self.eval_prompts = None
        if eval_dataset is not None:
            self.eval_prompts = setup.make_prompts(eval_dataset, self.processing_class, args)
        self.schedule = setup.make_schedule(len(self.train_prompts), args)
        scorer = setup.make_scorer(reward_funcs, reward_processing_classes, args, self.accelerator.device)
        actor_critic = factory.make_actor_critic(model, value_model, reward_funcs, peft_config, args)
        chat = any(prompts is not None and prompts.are_messages for prompts in (self.train_prompts, self.eval_prompts))
        self.sampling_params = setup.make_sampling_params(
            actor_critic, self.processing_class, args, chat=chat, accelerator=self.accelerator
        )
        setup.add_reward_adapter(scorer, actor_critic, args, self.accelerator.device)
        reference = factory.make_reference(actor_critic, ref_model, args)
        self.start_identity = start_identity(actor_critic, reference, scorer)
        self.collector = setup.make_collector(reference, scorer, self.accelerator, args)
        self.padding = agree_on_padding(actor_critic, reference, self.accelerator)
        self.updater = make_updater(self.accelerator, actor_critic, *optimizers, args=args, schedule=self.schedule)
        self.sampling_params = agree_on_backend(self.sampling_params, self.updater.engine)
        self.has_own_schedule = optimizers[1] is not None
        self.collector.prepare_frozen_models(self.updater.engine)
        self.mismatch_guard = MismatchGuard(self.updater.engine, args)
        has_reference, report = reference is not None, lambda text: self.run_log.message(text)
        self.critic_pretraining = setup.make_critic_pretraining(self.updater, self.schedule, args, report=report)
        self.old_policy = OldPolicySource(
            self.mismatch_guard, args, self.critic_pretraining, has_reference=has_reference, report=report
        )
        self.kl_controller = setup.make_kl_controller(args)
        self.set_up_run(callbacks or [])
        self.timers, self.rollout_poll, self.counts = metrics.Timers(), RolloutPoll(), RolloutCounts()
        self._early: EarlyCalls | None = None
        scorer.interruptible_call = lambda: self.rollout_poll.interruptible_call()

    def check_sampler(self) -> None:
        """Compares sampler and trainer on a few short responses, unless `rollout` or `_generate` is overridden: a
        subclass may sample in another way.

        Raises:
            ValueError: if the two disagree and `mismatch_action` is stop.
        """
        hooks = (self.rollout, self._generate)
        inherited = hooks == (MethodType(PPOTrainer.rollout, self), MethodType(PPOTrainer._generate, self))
        if self.mismatch_guard.active and inherited:
            prompts = self.spread_prompts(self.state.global_step)
            self.mismatch_guard.check_short_responses(self.collector, prompts, self.sampling_params)

    def step(self, prompt_batches: Sequence[PromptBatch]) -> dict[str, float]:
        """One rollout on this rank's prompts and the updates on the global batch; returns the step's metrics.

        A run that is resumed in the middle of a step's update continues with the rollouts stored in the checkpoint.
        """
        self.run_lock.acquire()
        self.timers, self.counts = metrics.Timers(), RolloutCounts()
        step, update = self.state.global_step, self.progress.pop_resumed_update()
        if update is None:
            rollouts = self._rollouts_with_advantages(prompt_batches)
            self.progress.advance(update=UpdateProgress(rollouts, self.timers.seconds, self.counts))
        else:
            rollouts, self.timers.seconds, self.counts = update.rollouts, update.seconds, update.counts
        with self.timers.measure("update"):
            train_stats = self.step_with_rollouts(rollouts)
        self.mark_step_done(step)
        self.pass_rates.record(rollouts, self.counts)
        stats = self.record_step_stats(train_stats, rollouts, step + 1)
        # A controller holds the KL of a policy that moves near its target, and a frozen one does not move.
        if not self.critic_pretraining.includes(step):
            kl = float(rollouts["kl"].sum(dim=1).mean())
            self.kl_controller.update(kl, num_sequences=rollouts["responses"].size(0))
        return stats

    def _rollouts_with_advantages(self, prompt_batches: Sequence[PromptBatch]) -> Rollouts:
        """The global rollouts with shaped rewards, advantages and returns."""
        rollouts = self.rollout(prompt_batches)
        hook_checks.check_rollouts(rollouts)
        if self.args.dynamic_sampling or self.args.curriculum:
            prompts = self.step_prompts(self.state.global_step)
            rounds = self.args.max_sampling_rounds if self.args.dynamic_sampling else 0
            rollouts = replace_uninformative(rollouts, prompts, self._redraw, max_rounds=rounds, counts=self.counts)
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
            response_mask=rollouts["response_mask"],
            scores=rollouts["rewards"],
            prompt_ids=rollouts["prompt_ids"],
            baseline_scores=rollouts.get("baseline_scores"),
            scores_by_source=rollouts["scores_by_source"],
        )
        hook_checks.add_to_rollouts(rollouts, "_estimate_advantage", estimated, hook_checks.ESTIMATED)
        return rollouts

    def _redraw(self, prompt_ids: Sequence[int], sampling_round: int) -> Rollouts:
        """The global rollouts of fresh prompts (dataset indices), which `dynamic_sampling` has drawn in a round."""
        with self.in_sampling_round(sampling_round):
            return self.rollout(self.collate(self.train_prompts, prompt_ids))

    def rollout(self, prompt_batches: Sequence[PromptBatch]) -> Rollouts:
        """Samples responses to this rank's prompts (`_generate`), scores them (`_score`) and evaluates them under
        policy, critic and reference.

        Returns the global rollouts of all ranks, on the CPU, in the prompts' order; `types.Rollouts` lists the keys
        up to `rewards`.
        """
        step = self.state.global_step
        sampling_params = replace(self.sampling_params, seed=self.args.seed, step=step)
        passes = rollout_passes(
            self.args,
            with_policy=self.old_policy.recomputes(step),
            policy_is_reference=self.old_policy.reads_reference(step),
            with_entropies=metrics.logs_entropies(step, self.args),
            may_be_empty=sampling_params.sampling_round > 0,
        )
        return self._rollout(prompt_batches, sampling_params, passes)

    def _rollout(
        self, prompt_batches: Sequence[PromptBatch], sampling_params: SamplingParams, passes: RolloutPasses
    ) -> Rollouts:
        engine, n = self.updater.engine, sampling_params.num_return_sequences
        count = sum(len(batch["rows"]) for batch in prompt_batches)
        prompts = self.collector.local_prompts(engine, prompt_batches, self.dummy_prompts)
        local = None
        with self.run_log.progress(count * (n + passes.greedy_baseline), "rollout", leave=False) as bar:
            self.rollout_poll = self.preemption.for_rollout(
                engine,
                stops_before_tokens=GENERATION_BACKENDS.trait(sampling_params.backend, "stops_before_tokens"),
                can_stop=self.progress.is_current,
                on_rows=bar.update,
            )
            with self.rollout_poll.rollout():
                rows = {} if prompts is None else self._local_rollout(prompts, sampling_params, passes)
                local = {key: value[: count * n] for key, value in rows.items() if count}
        rollouts, dropped = self.collector.gather(local, passes, samples_per_prompt=n, poll=self.rollout_poll)
        if dropped.num_dropped:
            self.counts.dropped_rows += dropped.num_dropped
            self.run_log.message(str(dropped))
        return rollouts

    def _local_rollout(
        self, prompts: PromptBatch, sampling_params: SamplingParams, passes: RolloutPasses
    ) -> dict[str, Tensor]:
        """This rank's rows, on the CPU: generated, scored, evaluated."""
        rows = self._generate_and_score(prompts, sampling_params)
        if passes.greedy_baseline:
            greedy = replace(sampling_params, do_sample=False, num_return_sequences=1)
            baseline = self._generate_and_score(prompts, greedy)
            add_baseline(rows, baseline, sequence_scores(baseline["rewards"]))
        with self.timers.measure("logprobs"):
            return rows | self.collector.evaluate(
                self.updater.engine, rows, passes, temperature=sampling_params.temperature, poll=self.rollout_poll
            )

    def _generate_and_score(self, prompts: PromptBatch, sampling_params: SamplingParams) -> dict[str, Tensor]:
        """Checked samples of this rank's prompts with their scores, on the CPU."""
        n, sources, parts = sampling_params.num_return_sequences, self.collector.scorer.names, []
        rows = [row for row in prompts["rows"] for _ in range(n)]
        chunks = hook_checks.score_chunks(len(rows), n, self.args.score_chunk_prompts)
        with self._calling_early(rows, chunks):
            with self.timers.measure("rollout"):
                samples = self._generate(prompts, sampling_params)
            samples = hook_checks.complete_samples(samples, prompts, sampling_params)
            self.rollout_poll()
            with self.timers.measure("score"):
                for chunk in chunks:
                    part = {key: value[chunk] for key, value in samples.items()}
                    scores = self._score(part, rows[chunk])
                    parts.append(hook_checks.check_scores(scores, part, num_sources=len(sources)))
        return samples | hook_checks.join_scores(parts, samples["response_mask"])

    @contextmanager
    def _calling_early(self, rows: list[dict[str, Any]], chunks: Sequence[slice]) -> Iterator[None]:
        """Lets reward functions be called for finished chunks while `_generate` samples the others.

        They are called in `_score` instead without `score_chunk_prompts`, where ranks run in lockstep, and where a
        subclass samples or scores in another way.
        """
        hooks = (self._generate, self._score)
        inherited = hooks == (MethodType(PPOTrainer._generate, self), MethodType(PPOTrainer._score, self))
        if not inherited or self.args.score_chunk_prompts is None or self.updater.engine.synced_forwards:
            yield
            return
        with early_calls(self.collector.scorer, self.processing_class, rows, chunks) as self._early:
            try:
                yield
            finally:
                self._early = None

    def _generate(self, prompts: PromptBatch, sampling_params: SamplingParams) -> dict[str, Tensor]:
        """Samples `sampling_params.num_return_sequences` (n) responses to each of this rank's P prompts.

        Override it to sample with another engine. The random numbers of each response are a function of its key
        alone (`sampling_params.random_keys(prompts["prompt_ids"])`), so that a run does not depend on batches or ranks.

        Args:
            prompts: token ids, left-padded, with the dataset's rows.
            sampling_params: lengths, temperature, stop tokens, and the seed and step of the random numbers.

        Returns:
            tensors on the CPU with P * n rows, the samples of a prompt next to one another: `responses` (P * n, R)
            int64 with R = max_new_tokens; `response_mask` (P * n, R) bool, True = a token the policy chose (holes are
            allowed); `rollout_logprobs` (P * n, R) float, the chosen tokens' log-probs in nats; `stopped` (P * n,)
            bool. Also `queries` and `query_attn_masks` (P * n, Q) if the hook changed a sample's prompt, and any extra
            tensors with one entry per row, which are passed on to `_score` and the later hooks.
        """
        return self.collector.sample(self.updater.engine, prompts, sampling_params, self.rollout_poll, self._early)

    def _score(self, samples: dict[str, Tensor], rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Scores finished responses with the run's reward sources.

        It may be called with a part of a rollout: `score_chunk_prompts` prompts at a time, each with all its samples.

        Args:
            samples: the checked samples of C responses: what `_generate` returned, with `queries`, `query_attn_masks`,
                `prompt_ids` and `sample_ids` added.
            rows: the dataset's row of each of them.

        Returns:
            `scores` (C,) float32, before any penalty; `rewards` (C,), or (C, R) with each token's reward in the column
            of the token; `scores_by_source` (C, sources).
        """
        scorer, penalties = self.collector.scorer, setup.make_penalties(self.args)
        return score_responses(scorer, self.processing_class, samples, rows, penalties=penalties, early=self._early)

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
        with self.run_log.progress(len(plan), "update", initial=update.num_attempted, leave=False) as bar:
            for part, epoch, batch in plan[update.num_attempted :]:
                if update.kl_stopped:
                    break
                bar.update(1)
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
            batch["queries"],
            batch["query_attn_masks"],
            batch["responses"],
            batch["response_mask"],
            value_taus=batch.get("value_taus"),
            temperature=self.args.temperature,
            chunk_size=self.args.logprob_chunk_size,
            kept_bytes=self.args.kept_logits_gib * 2**30,
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
            rows = rollout_tables.rollout_rows(rollouts, self.processing_class, self.args.num_logged_rollouts)
            self.run_log.log_rollouts(rows, step)
        return stats

    def evaluate(self) -> dict[str, float]:
        """Greedy (or sampled, `eval_do_sample`) responses to the eval prompts: reward, length and KL to the reference
        as `eval/*`.

        If `failed_rewards: drop` leaves no response, all of them but `eval/dropped_rows` are NaN.

        Sampled evaluations use the same random numbers each time, so that differences come from the policy. The table
        goes to eval/step_*.jsonl; called before `train`, it does not replace one that a run with checkpoints has left
        there.

        Raises:
            ValueError: when the trainer has no eval dataset.
        """
        if self.eval_prompts is None:
            raise ValueError("evaluate() needs prompts, but eval_dataset is None; pass eval_dataset to PPOTrainer")
        # What a training loop of one's own has dropped so far is for the step's record.
        of_step = self._pop_counts()
        self.timers = metrics.Timers()
        with self.run_lock.for_a_while():
            rollouts = self._rollout(
                self.collate(self.eval_prompts, range(len(self.eval_prompts))),
                setup.evaluation_sampling_params(self.sampling_params, self.args),
                RolloutPasses(with_critic=False, may_be_empty=True),
            )
            rows = rollout_tables.evaluation_rows(rollouts, self.processing_class)
            self.run_log.log_table("eval", rows, self.state.global_step)
        stats = {**metrics.evaluation_stats(rollouts), "time/eval": sum(self.timers.seconds.values())}
        stats |= self.counts.evaluation_stats(self.args)
        self.counts = of_step
        return stats

    def _pop_counts(self) -> RolloutCounts:
        """The counts of what was sampled since the last call."""
        counts, self.counts = self.counts, RolloutCounts()
        return counts
