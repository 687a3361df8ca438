"""PPOTrainer: the loop rollout -> _shape_reward -> _estimate_advantage -> step_with_rollouts, each step a method to
override.

The mathematics is in `functional`, sampling in `generation`, one rank's rollout in `rollouts`, what a run leaves on
disk in `run_keeping`. This file says in which order they happen and on which rows.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data import collate_prompts
from alpaca_ppo.distributed import collectives
from alpaca_ppo.distributed.accelerator import make_accelerator
from alpaca_ppo.distributed.failures import record_error
from alpaca_ppo.distributed.preemption import Interrupted, PreemptionHandler
from alpaca_ppo.functional import AdvantageInputs, shape_rewards
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.models import ActorCritic, ActorCriticOutputs, CriticHead, factory
from alpaca_ppo.models.loading import load_processing_class
from alpaca_ppo.ppo import metrics
from alpaca_ppo.ppo.advantages import RolloutParts, estimate_advantages, rollout_parts
from alpaca_ppo.ppo.hook_checks import ESTIMATED, SHAPED, NonFiniteUpdate, add_to_rollouts, check_rollouts
from alpaca_ppo.ppo.losses import correction_weights, loss_terms, sample_value_taus
from alpaca_ppo.ppo.minibatches import optimizer_steps, update_batches
from alpaca_ppo.ppo.updates import make_updater
from alpaca_ppo.tracking import rollout_tables
from alpaca_ppo.tracking.callbacks import CallbackHandler
from alpaca_ppo.trainer import setup
from alpaca_ppo.trainer.base_trainer import BaseTrainer
from alpaca_ppo.trainer.preflight import check_output_dir
from alpaca_ppo.trainer.progress import TrainProgress, UpdateProgress
from alpaca_ppo.types import PromptBatch, Rollouts

RewardFunc = str | PreTrainedModel | Callable[..., Any]


class PPOTrainer(BaseTrainer):
    """Trains a causal language model with PPO and a critic against any reward.

    Args:
        model: the policy: a path or hub id (of an adapter too), a model in memory (trained in place; of a `PeftModel`
            the adapter trains on), or an `ActorCritic` that brings its critic.
        reward_funcs: one source or a list: python functions with TRL's signature, `module:function` names, and
            sequence classifiers (a path, a hub id or a model) with one label.
        args: the configuration.
        train_dataset: rows with a prompt column, or the columns that `args.prompt_template` names.
        eval_dataset: held-out rows of the same form, for `evaluate`.
        processing_class: the policy's tokenizer; loaded from the model's folder by default.
        value_model: a sequence classifier with one label, or a `final/value` folder, to start the critic from.
        ref_model: the reference policy; by default what `args.reference` says.
        peft_config: a `peft.LoraConfig`: the policy's base is frozen, and adapters are trained.
        reward_processing_classes: the tokenizers of reward models that were built in memory, one or a list as long as
            `reward_funcs`; a model from a folder brings its own.
        callbacks: `transformers.TrainerCallback`s.
        optimizers: an optimizer over `ActorCritic` parameters and a schedule, each None for the default.
        accelerator: one of your own; built from `args` by default.

    Raises:
        ValueError: for arguments that cannot work together.
    """

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
        self.args = args
        check_output_dir(args)
        self.accelerator = make_accelerator(args, accelerator)
        self.processing_class = processing_class or load_processing_class(
            model, trust_remote_code=args.trust_remote_code
        )
        how = (self.processing_class, args)
        self.train_prompts = setup.make_prompts(train_dataset, *how)
        self.eval_prompts = None if eval_dataset is None else setup.make_prompts(eval_dataset, *how)
        self.schedule = setup.make_schedule(len(self.train_prompts), args)
        scorer = setup.make_scorer(reward_funcs, reward_processing_classes, args, self.accelerator.device)
        actor_critic = factory.make_actor_critic(model, value_model, reward_funcs, peft_config, args)
        self.sampling = setup.make_sampling(actor_critic.policy.model, self.processing_class, args)
        setup.add_reward_adapter(scorer, actor_critic, args, self.accelerator.device)
        reference = factory.make_reference(actor_critic, ref_model, args)
        self.collector = setup.make_collector(reference, scorer, self.accelerator, *how)
        self.updater, self.optimizer_steps = make_updater(
            self.accelerator, actor_critic, *optimizers, args=args, schedule=self.schedule
        )
        self.collector.prepare_frozen_models(self.updater.engine.prepare_frozen_model)
        self.kl_controller = setup.make_kl(args)
        self.state = setup.make_state(self.schedule, self.accelerator)
        self.callback_handler = CallbackHandler(callbacks or [], self.state)
        self.interruption, self.progress = PreemptionHandler(self.accelerator), TrainProgress()
        self.run_log, self.skipped_updates, self.timers = None, 0, metrics.Timers()

    @property
    def model(self) -> Any:
        """What `compute_loss` calls: policy and critic, wrapped for DDP or mixed precision where the run needs it."""
        return self.updater.model

    def train(self, resume_from_checkpoint: bool | str | None = None) -> dict[str, float]:
        """Runs all steps, from a checkpoint if asked, and saves the final models; returns the last step's metrics.

        SIGTERM and SIGINT end the micro-batch or the sampling under way, save a checkpoint and end the process.

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the newest complete one of `output_dir`.

        Raises:
            Interrupted: after a signal, once the checkpoint is written: a SystemExit of 143 (SIGTERM) or 130 (SIGINT).
        """
        with record_error(), self.interruption.install():
            try:
                return self._train(resume_from_checkpoint)
            except Interrupted as interrupted:
                self._save_interrupted(interrupted)
                raise

    def _train(self, resume_from_checkpoint: bool | str | None) -> dict[str, float]:
        self._begin(resume_from_checkpoint)
        num_steps = self.schedule.num_steps
        with self._log.progress(num_steps, "ppo", initial=self.state.global_step) as progress:
            while self.state.global_step < num_steps and not self.callback_handler.control.should_training_stop:
                self._check()
                self.callback_handler.begin_step()
                self._notify("on_step_begin")
                self._end_step(self.step(self.prompt_batches(self.state.global_step)))
                progress.update(1)
        self._check()
        self.save_model(stats=self.progress.stats)
        self._notify("on_train_end")
        self._log.finish()
        collectives.drain_collectives(self.accelerator)
        return self.progress.stats

    def prompt_batches(self, step: int) -> list[PromptBatch]:
        """This rank's prompts of `step` (from 0): one batch, or none where a ragged step has fewer prompts than
        ranks.
        """
        return self._collate(self.train_prompts, self.schedule.indices(step))

    def step(self, prompt_batches: Sequence[PromptBatch]) -> dict[str, float]:
        """One rollout on this rank's prompts and the updates on the global batch; returns the step's metrics.

        Where a resumed run stands within the step's update, its rollouts are there already.
        """
        self.timers = metrics.Timers()
        update = self.progress.take_resumed()
        if update is None:
            rollouts = self._estimated_rollouts(prompt_batches)
            self._advance(update=UpdateProgress(rollouts, self.timers.seconds))
        else:
            rollouts, self.timers.seconds = update.rollouts, update.seconds
        with self.timers.measure("update"):
            train_stats = self.step_with_rollouts(rollouts)
        stats = self.record_step_stats(train_stats, rollouts, self.state.global_step)
        self.kl_controller.update(float(rollouts["kl"].sum(dim=1).mean()), n_steps=rollouts["responses"].size(0))
        return stats

    def _estimated_rollouts(self, prompt_batches: Sequence[PromptBatch]) -> Rollouts:
        rollouts = self.rollout(prompt_batches)
        check_rollouts(rollouts)
        names = ("rewards", "responses", "logprobs", "ref_logprobs", "response_mask")
        shaped = self._shape_reward(**{name: rollouts[name] for name in names})  # type: ignore[literal-required]
        add_to_rollouts(rollouts, "_shape_reward", shaped, SHAPED)
        estimated = self._estimate_advantage(
            rewards=rollouts["shaped_rewards"],
            values=rollouts.get("values"),
            response_mask=rollouts["response_mask"],
            scores=rollouts["rewards"],
            prompt_ids=rollouts["prompt_ids"],
            baseline_scores=rollouts.get("baseline_scores"),
        )
        add_to_rollouts(rollouts, "_estimate_advantage", estimated, ESTIMATED)
        return rollouts

    def rollout(self, prompt_batches: Sequence[PromptBatch]) -> Rollouts:
        """Samples responses to this rank's prompts, scores them and evaluates them under policy, critic and reference.

        Returns the global rollouts of all ranks, on the CPU, in the prompts' order; `types.Rollouts` lists the keys
        up to `rewards`.
        """
        parts = rollout_parts(self.args)
        return self._collect(prompt_batches, self.sampling, parts, seed=self.args.seed, step=self.state.global_step)

    def _shape_reward(
        self, rewards: Tensor, responses: Tensor, logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor
    ) -> dict[str, Tensor]:
        """Adds the KL penalty (`use_kl_in_reward`): (B,) or (B, R) rewards to `shaped_rewards`, `non_score_rewards` and
        `kl`, each (B, R).
        """
        penalty: dict[str, Any] = {"kl_coef": self.kl_controller.value if self.args.use_kl_in_reward else 0.0}
        penalty |= {"kl_estimator": self.args.kl_estimator}
        return shape_rewards(rewards, logprobs, ref_logprobs, response_mask, **penalty)._asdict()

    def _estimate_advantage(
        self, rewards: Tensor, values: Tensor | None, response_mask: Tensor, **extra: Any
    ) -> dict[str, Tensor]:
        """`advantages` and `returns` (B, R) of shaped rewards (B, R) and values (B, R; None without a critic).

        `extra` holds `scores` (B,) or (B, R), the rewards before shaping, `prompt_ids` (B,), and `baseline_scores`
        (B,) or None, for estimators that need them.
        """
        inputs = AdvantageInputs(
            rewards=rewards,
            values=values,
            response_mask=response_mask,
            scores=extra.get("scores"),
            prompt_ids=extra.get("prompt_ids"),
            baseline_scores=extra.get("baseline_scores"),
        )
        return estimate_advantages(inputs, self.args)._asdict()

    def step_with_rollouts(self, rollouts: Rollouts) -> dict[str, float]:
        """`ppo_epochs` passes of optimizer steps over the global rollouts; returns the statistics of all ranks.

        Ends the step: `state.global_step`, on which the next rollout's randomness depends, is one more afterwards.
        """
        rows = rollouts["responses"].size(0)
        rollouts.update(correction_weights(rollouts, self.args))  # type: ignore[typeddict-item]
        done = self._update_progress(rollouts)
        sizes, key = (rows, self.args.step_batch_size, self.args.ppo_epochs), (self.args.seed, self.state.global_step)
        with self._log.progress(optimizer_steps(*sizes), "update", initial=done.num_attempted, leave=False) as progress:
            for epoch, batch in islice(update_batches(*sizes, key), done.num_attempted, None):
                if done.kl_stopped:
                    break
                how: dict[str, Any] = {"freeze_policy": self.in_critic_warmup, "check": self._check}
                how["value_taus"] = sample_value_taus(self.critic_head, *key, epoch, done.num_attempted)
                how["target_kl_stop"] = self.args.target_kl_stop
                how["policy_unchanged"] = done.optimizer_steps == 0 or self.in_critic_warmup
                progress.update(1)
                try:
                    part, stepped = self.updater.step(rollouts, batch, self.compute_loss, **how)
                    done.add(part, stepped=stepped)
                except NonFiniteUpdate as refused:
                    self._skip_update(refused)
                    done.skipped += 1
                if done is self.progress.update:
                    self._advance()
        train_stats = self.updater.over_ranks(done.stats).compute(done.optimizer_steps + done.kl_stopped)
        self.updater.warn(train_stats)
        self.state.global_step += 1
        self.state.epoch = self.schedule.epoch_at(self.state.global_step)
        counts = {"optimizer_steps": done.optimizer_steps, "skipped_updates": done.skipped}
        counts["kl_stopped"] = done.kl_stopped
        return {**train_stats, **{f"policy/{name}": float(count) for name, count in counts.items()}}

    @property
    def critic_head(self) -> CriticHead | None:
        """The critic's head, whatever wraps the model; None without a critic."""
        critic = self.updater.engine.actor_critic.critic
        return None if critic is None else critic.head

    @property
    def in_critic_warmup(self) -> bool:
        """Whether only the critic learns in this step."""
        return self.state.global_step < self.args.critic_warmup_steps

    def compute_loss(self, rollouts_batch: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and detached statistics of one micro-batch, on the device.

        The loss is this micro-batch's part of the optimizer step's loss: a masked sum over
        `rollouts_batch["denominator"]`, so parts add up. Statistics named `loss/*` add up likewise, `*_min` and
        `*_max` are extremes, all others means over the micro-batch's masked tokens.

        Inside an update, and unless a subclass overrides this method, a critic that shares no activations with the
        policy makes its backward pass in here, to free its memory; its part of the loss is then a mere number.
        """
        # A subclass may change the loss, so its critic must not have made its backward pass already.
        first = type(self).compute_loss is PPOTrainer.compute_loss and self.updater.separate_backward
        terms = loss_terms(
            partial(self._forward, rollouts_batch),
            rollouts_batch,
            self.args,
            head=self.critic_head,
            with_policy=not self.in_critic_warmup,
            critic_backward_first=self.updater.critic_backward_first if first else None,
        )
        loss = torch.stack([term for term, _ in terms]).sum()
        stats = {name: stat.detach() for _, part in terms for name, stat in part.items()}
        return loss, {**stats, "loss/total": loss.detach()}

    def _forward(self, batch: Any, **parts: bool) -> ActorCriticOutputs:
        tensors = [batch[key] for key in ("queries", "query_attn_masks", "responses", "response_mask")]
        how = {"temperature": self.args.temperature, "chunk_size": self.args.logprob_chunk_size}
        outputs: ActorCriticOutputs = self.model(*tensors, value_taus=batch.get("value_taus"), **how, **parts)
        return outputs

    def record_step_stats(self, train_stats: dict[str, float], rollouts: Rollouts, step: int) -> dict[str, float]:
        """The metrics of `step` (from 1) as a flat dictionary, AlpacaFarm's names where it has them."""
        stats = {
            "objective/kl_coef": self.kl_controller.value if self.args.use_kl_in_reward else 0.0,
            "objective/lr": self.updater.learning_rate,
            **metrics.objective_stats(rollouts, source_names=self.collector.scorer.names),
            **metrics.advantage_stats(rollouts),
            **{name if name.startswith("mismatch/") else f"ppo/{name}": v for name, v in train_stats.items()},
        }
        local = {**self.timers.seconds, "memory/peak_gib": metrics.peak_memory_gib(self.accelerator.device)}
        stats |= metrics.throughput_stats(rollouts, collectives.max_over_ranks(local, self.accelerator))
        if self.args.num_logged_rollouts:
            rows = rollout_tables.rollout_rows(rollouts, self.processing_class, self.args.num_logged_rollouts)
            self._log.log_rollouts(rows, step)
        return stats

    def evaluate(self) -> dict[str, float]:
        """Greedy (or sampled, `eval_do_sample`) responses to the eval prompts: reward, length and KL to the reference
        as `eval/*`.

        Sampled evaluations use the same random numbers each time, so that differences come from the policy. The table
        goes to eval/step_*.jsonl.

        Raises:
            ValueError: when the trainer has no eval dataset.
        """
        if self.eval_prompts is None:
            raise ValueError("evaluate() needs prompts, but eval_dataset is None; pass eval_dataset to PPOTrainer")
        sampling = setup.evaluation_sampling(self.sampling, self.args)
        self.timers = metrics.Timers()
        batches = self._collate(self.eval_prompts, range(len(self.eval_prompts)))
        parts = RolloutParts(with_critic=False)
        rollouts = self._collect(batches, sampling, parts, seed=self.args.seed + 1, step=0)
        self._log.log_table(
            "eval", rollout_tables.evaluation_rows(rollouts, self.processing_class), self.state.global_step
        )
        return {**metrics.evaluation_stats(rollouts), "time/eval": sum(self.timers.seconds.values())}

    def _collate(self, prompts: Any, indices: Sequence[int]) -> list[PromptBatch]:
        share = collectives.rank_share(indices, self.accelerator)
        if not share:
            return []
        pad = self.sampling.pad_token_id
        return [collate_prompts([prompts[i] for i in share], share, pad_token_id=pad, query_len=self.args.query_len)]

    def _dummy_prompts(self, count: int) -> PromptBatch:
        items, pad = [self.train_prompts[0]] * count, self.sampling.pad_token_id
        return collate_prompts(items, [0] * count, pad_token_id=pad, query_len=self.args.query_len)

    def _collect(
        self, batches: Sequence[PromptBatch], sampling: SamplingParams, parts: RolloutParts, **how: Any
    ) -> Rollouts:
        n = sampling.num_return_sequences
        real = sum(len(batch["rows"]) for batch in batches)
        synced_forwards, stoppable = self.updater.engine.synced_forwards, self._can_checkpoint
        if synced_forwards:
            # Ranks make the same passes where parameters lie in parts on all of them; what fills up is dropped below.
            batches = collectives.pad_to_longest_rank(batches, real, self._dummy_prompts, self.accelerator)
        local = None
        with self._log.progress(real * n, "rollout", leave=False) as progress:
            how |= {"timers": self.timers, "on_chunk": progress.update, **vars(parts)}
            self.interruption.synced_forwards = synced_forwards and stoppable
            how["interruption"] = self.interruption if stoppable else None
            # A rank that leaves this block early tells the others in the gathering.
            with self.interruption.sampling() if stoppable and not synced_forwards else nullcontext():
                found = self.collector.collect(self.updater.engine, batches, sampling, **how)
                local = {key: value[: real * n] for key, value in found.items() if real}
        rows: Any = collectives.gather_rows(local, self.accelerator, samples_per_prompt=n)
        if rows is None:
            self.interruption.poll_all_ranks()
        given: Rollouts = rows
        return given
