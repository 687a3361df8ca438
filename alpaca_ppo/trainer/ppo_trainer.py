"""`PPOTrainer`: one step of PPO as hooks to override: rollout -> _shape_reward -> _estimate_advantage ->
step_with_rollouts.

The mathematics is in `functional`, the parts of a step in `ppo`. The hooks within `rollout`, `_generate` and `_score`,
are in `rollout_trainer`; the loop over steps, with logging and checkpoints, is in `base_trainer`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from alpaca_ppo.checkpoint.compatibility import start_identity
from alpaca_ppo.checkpoint.serialization import checkpoint_bytes
from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.fields import check_needs
from alpaca_ppo.config.names import model_folder
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data import introduction
from alpaca_ppo.distributed.accelerator import make_accelerator
from alpaca_ppo.distributed.collectives import max_over_ranks
from alpaca_ppo.distributed.preemption import PreemptionHandler
from alpaca_ppo.environments.kinds import EnvironmentFactory, make_kinds
from alpaca_ppo.environments.tool_calls import ToolCallParser
from alpaca_ppo.functional import AdvantageInputs, shape_rewards
from alpaca_ppo.generation import make_backend
from alpaca_ppo.models import ActorCritic, ActorCriticOutputs, factory
from alpaca_ppo.models.loading import check_same_tokenizer, load_processing_class
from alpaca_ppo.models.reference import make_reference
from alpaca_ppo.ppo import hook_checks, metrics
from alpaca_ppo.ppo.advantages import estimate_advantages
from alpaca_ppo.ppo.agreements import agree_on_backend, agree_on_padding
from alpaca_ppo.ppo.kl_controllers import KLController
from alpaca_ppo.ppo.losses import correction_weights, critic_terms, policy_terms
from alpaca_ppo.ppo.metrics import StepStats
from alpaca_ppo.ppo.minibatches import compared_mask, plan_updates
from alpaca_ppo.ppo.mismatch import SamplerCheck
from alpaca_ppo.ppo.rollouts import RolloutCollector
from alpaca_ppo.ppo.updates import make_updater
from alpaca_ppo.rewards import FunctionReward
from alpaca_ppo.rewards.build import RewardFunc
from alpaca_ppo.rewards.scorer import Penalties
from alpaca_ppo.tracking import rollout_tables
from alpaca_ppo.tracking.console import samples_are_due
from alpaca_ppo.tracking.run_log import RunLog
from alpaca_ppo.tracking.run_record import RunRecord
from alpaca_ppo.trainer import preflight, setup
from alpaca_ppo.trainer.evaluation import EvaluatingTrainer, Evaluator
from alpaca_ppo.trainer.inspected_prompts import logged_rollouts
from alpaca_ppo.types import PromptBatch, Rollouts


class PPOTrainer(EvaluatingTrainer):
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

    _last_rollouts: Rollouts | None = None

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
        args = preflight.check_config_class(args)
        model, ref_model = model_folder("model", model), model_folder("ref_model", ref_model)
        value_model = model_folder("value_model", value_model, part="value", writes_text=False)
        if args.reference not in REFERENCES:
            args = replace(args, reference=model_folder("reference", args.reference))
        preflight.check_output_dir(args)
        kinds = make_kinds(tools, environment_factory)
        evaluation = preflight.check_evaluation(args, reward_funcs, metric_funcs, kinds)
        # A subclass that scores in another way may give the functions more than the dataset has.
        if type(self)._score is PPOTrainer._score:
            preflight.check_reward_columns(train_dataset, eval_dataset, reward_funcs, metric_funcs, kinds)
        start = factory.first_reward_model(reward_funcs) if args.init_value_with_reward else value_model
        self.args, self.run_record = args, RunRecord.of_objects(type(self), given)
        self.accelerator, trust = make_accelerator(args, accelerator), args.trust_remote_code
        self.processing_class = processing_class or load_processing_class(model, trust_remote_code=trust)
        self.train_prompts = setup.make_prompts(train_dataset, self.processing_class, args, kinds)
        for line in introduction(self.train_prompts, self.processing_class):
            self.accelerator.print(line)
        self.eval_prompts = setup.make_eval_prompts(eval_dataset, self.processing_class, args, kinds)
        chat = any(prompts.are_messages for prompts in (self.train_prompts, *self.eval_prompts.values()))
        device = self.accelerator.device
        scorer = setup.make_scorer(reward_funcs, reward_processing_classes, args, device, kinds)
        metric_scorer = setup.build_scorer(metric_funcs, metric_processing_classes, args, device, measures=True)
        check_needs(
            args,
            eval_set=bool(self.eval_prompts),
            reward_functions=bool(scorer.functions or kinds),
            # A `_generate` of one's own may leave holes in responses, at which turns end.
            environments_or_tools=bool(kinds) or type(self)._generate is not PPOTrainer._generate,
            prompts_that_are_messages=chat,
        )
        self.schedule = setup.make_schedule(len(self.train_prompts), args)
        actor_critic = factory.make_actor_critic(model, value_model, reward_funcs, peft_config, args)
        trained = (parameter for parameter in actor_critic.parameters() if parameter.requires_grad)
        self.checkpoint_size = checkpoint_bytes(trained, adamw=args.save_steps > 0 and optimizers[0] is None)
        if args.uses_critic and args.critic_layout == "separate" and isinstance(start, str):
            # Of a model in memory the tokenizer is not known.
            check_same_tokenizer(start, self.processing_class, trust_remote_code=trust)
        self.sampling_params = setup.make_sampling_params(actor_critic, self.processing_class, args, chat=chat)
        setup.add_reward_adapter(scorer, actor_critic, args, device)
        self.environments = setup.make_environments(
            kinds, tool_call_parser, self.processing_class, self.sampling_params, args, messages=chat
        )
        if self.environments is not None:
            for name, function in self.environments.reward_functions():
                scorer.add(FunctionReward(function, name=name), 1.0)
        reference = make_reference(actor_critic, ref_model, args)
        self.start_identity = start_identity(actor_critic, reference, scorer, self.environments)
        self.padding = agree_on_padding(actor_critic, reference, self.accelerator)
        self.updater = make_updater(self.accelerator, actor_critic, *optimizers, args=args, schedule=self.schedule)
        backend, self.preemption = make_backend(args.generation_backend, args), PreemptionHandler(self.accelerator)
        self.collector = RolloutCollector(
            self.updater.engine, args, reference, scorer, metric_scorer, backend, self.preemption
        )
        answered = self.environments is not None and self.environments.answer
        self.sampler_fallback = agree_on_backend(backend, self.updater.engine, answered=answered)
        self.has_own_schedule = optimizers[1] is not None
        self.collector.prepare_frozen_models()
        self.run_log = RunLog(self.accelerator, args)
        self.evaluator = Evaluator(evaluation, self.collector, self.processing_class)
        self.sampler_check = SamplerCheck(self.collector, answered=answered, report=self.run_log.message)
        self.kl_controller = KLController(
            args.kl_controller, args.kl_coef, target_kl=args.target_kl, horizon=args.kl_horizon
        )
        self.penalties = Penalties(args.penalty_reward_value, args.overlong_buffer_len)
        self.set_up_run(callbacks or [])

    def step(self, prompt_batches: Sequence[PromptBatch]) -> dict[str, float]:
        """One rollout on this rank's prompts and the updates on the global batch; returns the step's metrics."""
        step, rollouts = self.state.global_step + 1, self.step_rollouts(prompt_batches)
        shaped = self._shape_reward(
            rewards=rollouts["rewards"],
            responses=rollouts["responses"],
            logprobs=rollouts["logprobs"],
            ref_logprobs=rollouts["ref_logprobs"],
            response_mask=rollouts["response_mask"],
        )
        rollouts |= hook_checks.checked("_shape_reward", shaped, rollouts)
        estimated = self._estimate_advantage(
            rewards=rollouts["shaped_rewards"],
            values=rollouts.get("values"),
            response_mask=compared_mask(rollouts),
            scores=rollouts["rewards"],
            prompt_ids=rollouts["prompt_ids"],
            baseline_scores=rollouts.get("baseline_scores"),
            scores_by_source=rollouts["scores_by_source"],
        )
        rollouts |= hook_checks.checked("_estimate_advantage", estimated, rollouts)
        train_stats = self.step_with_rollouts(rollouts)
        return self.record_step_stats(train_stats, rollouts, step)

    def _shape_reward(
        self, rewards: Tensor, responses: Tensor, logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor
    ) -> dict[str, Tensor]:
        """Turns (B,) or (B, R) rewards into `shaped_rewards` by adding the KL penalty (by `kl_coef`); also
        returns `non_score_rewards` and `kl`. All are (B, R).
        """
        return shape_rewards(
            rewards,
            logprobs,
            ref_logprobs,
            response_mask,
            kl_coef=self.kl_controller.value,
            kl_estimator=self.args.kl_estimator,
        )._asdict()

    def _estimate_advantage(
        self, rewards: Tensor, values: Tensor | None, response_mask: Tensor, **extra: Any
    ) -> dict[str, Tensor]:
        """`advantages` and `returns` (B, R) of shaped rewards (B, R) and values (B, R; None without a critic).

        `extra` holds `scores` (B,) or (B, R), the rewards before shaping, `prompt_ids` (B,), `baseline_scores` (B,) or
        None, and `scores_by_source` (B, sources), for estimators that need them.
        """
        inputs = AdvantageInputs(rewards=rewards, values=values, response_mask=response_mask, **extra)
        return estimate_advantages(inputs, self.args, monte_carlo_returns=self.in_critic_pretraining)._asdict()

    def step_with_rollouts(self, rollouts: Rollouts) -> dict[str, float]:
        """The optimizer steps on the global rollouts (`ppo.minibatches.plan_updates`); returns the statistics of all
        ranks.

        Counts the step, so that the next `rollout` of a custom loop uses new random numbers.
        """
        step, stats = self.state.global_step, StepStats()
        rollouts.update(correction_weights(rollouts, self.args))  # type: ignore[typeddict-item]
        rows, critic_only = rollouts["responses"].size(0), self.in_critic_pretraining
        plan = plan_updates(rows, self.args, step, critic_only=critic_only)
        with self.timers.measure("update", len(plan)) as count_updates:
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
        self.updater.warn(train_stats)
        self.state.global_step = step + 1
        return train_stats

    def _record_skip(self, cause: str, prompt_ids: list[int]) -> None:
        """Counts and logs a skipped optimizer step. The count covers the whole run, including the time before a resume.

        Raises:
            FloatingPointError: when more than `max_skipped_updates` have been skipped in total.
        """
        self.progress.skipped_updates += 1
        number, step, limit = self.progress.skipped_updates, self.state.global_step + 1, self.args.max_skipped_updates
        self.run_log.append(
            "skipped_updates", {"number": number, "step": step, "cause": cause, "prompt_ids": prompt_ids}
        )
        text = (
            f"step {step}: {cause}: the update was skipped and the weights are unchanged (prompts {prompt_ids}); "
            f"{number} updates in this run had a non-finite loss or gradient, max_skipped_updates is {limit}"
        )
        if number > limit:
            raise FloatingPointError(f"{text}; to continue, raise it and resume from the last checkpoint")
        self.run_log.message(text)

    @property
    def in_critic_pretraining(self) -> bool:
        """Whether this step trains the critic alone, on Monte-Carlo returns."""
        return self.state.global_step < self.args.critic_pretraining_steps

    def compute_policy_loss(self, batch: Rollouts, outputs: ActorCriticOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and statistics of the policy in one micro-batch, on the device: policy gradient, successes, KL, entropy.

        The loss is this micro-batch's part of the optimizer step's loss: a masked sum divided by
        `batch["denominator"]`, so that the parts add up. Statistics named `loss/*` add up in the same way, `*_min` and
        `*_max` are extremes, all others means over the micro-batch's masked tokens.
        """
        return policy_terms(batch, outputs, self.args)

    def compute_value_loss(self, batch: Rollouts, outputs: ActorCriticOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The same of the critic: its loss times `vf_coef`. It has a backward pass of its own if the critic shares no
        activations with the policy; `outputs` then has the critic's part only.
        """
        assert self.actor_critic.critic is not None
        return critic_terms(batch, outputs, self.actor_critic.critic.head, self.args)

    def record_step_stats(self, train_stats: dict[str, float], rollouts: Rollouts, step: int) -> dict[str, float]:
        """The metrics of `step` (from 1) as a flat dictionary, with AlpacaFarm's names if it has them. `kl_controller`
        then sets `kl_coef` for the next step.
        """
        stats = {
            "objective/kl_coef": self.kl_controller.value,
            **self.updater.learning_rates.stats(),
            **metrics.objective_stats(rollouts, source_names=self.collector.scorer.names),
            **metrics.advantage_stats(rollouts, self.args),
            **self.sampler_check.stats(rollouts),
            **self.logged_means(),
            **self.drawn_stats,
            **{name if name.startswith("mismatch/") else f"ppo/{name}": v for name, v in train_stats.items()},
        }
        timers, self.timers = self.timers, self.new_timers()
        local = {**timers.seconds, "memory/peak_gib": metrics.peak_memory_gib(self.accelerator.device)}
        stats |= metrics.throughput_stats(rollouts, max_over_ranks(local, self.accelerator))
        self._last_rollouts = rollouts
        # A controller holds the KL of a policy that moves near its target, and a frozen one does not move.
        if step > self.args.critic_pretraining_steps:
            kl = float(rollouts["kl"].sum(dim=1).mean())
            scores_std = stats["objective/scores_std"]
            self.kl_controller.update(kl, num_sequences=len(rollouts["responses"]), scores_std=scores_std)
        return stats

    def log_rollouts(self) -> None:
        """Writes the table of the last step's rollouts, after its update."""
        step, rollouts, self._last_rollouts = self.state.global_step, self._last_rollouts, None
        if rollouts is not None and self.args.num_logged_rollouts:
            rows = logged_rollouts(self.collector, self.processing_class, rollouts, step)
            rollout_tables.add_columns(rows, self.train_prompts, self.args.prompt_column)
            self.run_log.log_table("rollouts", rows, step)
        if rollouts is not None and samples_are_due(step):
            self.run_log.samples = rollout_tables.sample_rows(rollouts, self.processing_class)
