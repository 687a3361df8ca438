"""`RolloutTrainer`: the rollouts of a step or an evaluation: which prompts, their samples, scores and log-probs.

What a step learns from them is in `ppo_trainer`; the passes themselves are in `ppo.rollouts`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from alpaca_ppo.data import PromptDataset, collate_prompts
from alpaca_ppo.data.schedule import StepPrompts
from alpaca_ppo.distributed import collectives
from alpaca_ppo.environments.episodes import Environments, Episodes
from alpaca_ppo.functional.shaping import per_token, sequence_scores
from alpaca_ppo.generation.responses import SamplingParams
from alpaca_ppo.ppo import hook_checks, metrics
from alpaca_ppo.ppo.dynamic_sampling import replace_uninformative
from alpaca_ppo.ppo.minibatches import add_baseline, leave_out_failures
from alpaca_ppo.ppo.mismatch import spread_by_length
from alpaca_ppo.ppo.rollouts import RolloutPasses
from alpaca_ppo.registry import ADV_ESTIMATORS
from alpaca_ppo.rewards.reward_function import merged
from alpaca_ppo.rewards.scorer import Penalties, score_responses
from alpaca_ppo.trainer.base_trainer import BaseTrainer
from alpaca_ppo.types import PromptBatch, Rollouts

Measure = Callable[[Mapping[str, Tensor], list[dict[str, Any]]], dict[str, Tensor]]
"""From this rank's samples and the dataset row of each to further tensors with one entry per row."""
_SHOWN_PHASES = {"rollout": "sampling", "score": "scoring", "logprobs": "log-probs"}
"""The names of timed phases in the progress bar, where they differ from those in `time/*`."""


class RolloutTrainer(BaseTrainer):
    """Samples and scores the responses of a run. A subclass learns from them (`step`)."""

    sampling_params: SamplingParams
    environments: Environments | None
    penalties: Penalties

    def set_up_run(self, callbacks: Sequence[Any]) -> None:
        """Also sets up what a rollout records and how it is interrupted."""
        super().set_up_run(callbacks)
        self.timers = self.new_timers()
        self.drawn_stats: dict[str, float] = {}
        """The metrics of what `dynamic_sampling` has drawn in this step."""
        self.logged: dict[str, list[float]] = {}
        """Sum and number of the values of each metric that reward functions have logged since the last step."""
        self._episodes: Episodes | None = None
        scorer, metric_scorer = self.collector.scorer, self.collector.metric_scorer
        metric_scorer.logged = scorer.logged
        for each in (scorer, metric_scorer):
            each.offer(self.state)
            each.interruptible_call = partial(self.preemption.part, at_once=True)
        scorer.on_source = lambda name: self.run_log.bar.detail(name)

    def new_timers(self) -> metrics.Timers:
        """Timers at 0, whose phases the progress bar shows."""
        return metrics.Timers(lambda phase, parts: self.run_log.bar.phase(_SHOWN_PHASES.get(phase, phase), parts))

    def check_sampler(self) -> None:
        """Compares sampler and trainer on short responses to at most 4 of the next step's prompts, of lengths as
        different as possible, unless `rollout` or `_generate` is overridden: a subclass may sample in another way.

        Raises:
            ValueError: if the two disagree and `mismatch_action` is stop.
        """
        own, hooks = type(self), RolloutTrainer
        inherited = own.rollout is hooks.rollout and own._generate is hooks._generate
        if self.sampler_check.compares and inherited and not self.train_prompts.any_blank:
            # The same on every rank.
            ids = self.step_prompts(self.state.global_step).indices[:16]
            items = [self.train_prompts[i] for i in ids]
            chosen = spread_by_length([len(item["input_ids"]) for item in items], count=4)
            prompts = self.prompt_batch([items[i] for i in chosen], [ids[i] for i in chosen])
            self.sampler_check.before_training(prompts, self.sampling_params)

    def prompt_batches(self, step: int) -> list[PromptBatch]:
        """This rank's prompts of `step` (from 0): one batch, or an empty list if the step has fewer prompts than
        there are ranks. A loop of one's own holds the lock on the output folder from its first ones on.
        """
        self.run_lock.acquire()
        return self.collate(self.train_prompts, self.step_prompts(step).indices)

    def step_prompts(self, step: int) -> StepPrompts:
        """The dataset indices of `step` (from 0), on all ranks."""
        return self.schedule.prompts_of(step, self.progress.extra_prompts(step))

    def step_rollouts(self, prompt_batches: Sequence[PromptBatch]) -> Rollouts:
        """The global rollouts of a step (`rollout`), in which fresh prompts have taken the places of those without
        spread (`dynamic_sampling`).
        """
        rollouts = self.rollout(prompt_batches)
        hook_checks.check_rollouts(rollouts)
        if not self.args.dynamic_sampling:
            return rollouts
        prompts = self.step_prompts(self.state.global_step)
        rollouts, self.drawn_stats = replace_uninformative(rollouts, prompts, self._redraw, args=self.args)
        self.progress.drawn[self.state.global_step] = prompts.extra_prompts
        return rollouts

    def _redraw(self, prompt_ids: Sequence[int], sampling_round: int) -> Rollouts:
        """The global rollouts of fresh prompts (dataset indices), which `dynamic_sampling` has drawn in a round: with
        random numbers of its own.
        """
        of_step = self.sampling_params
        self.sampling_params = replace(of_step, sampling_round=sampling_round)
        try:
            return self.rollout(self.collate(self.train_prompts, prompt_ids))
        finally:
            self.sampling_params = of_step

    def rollout(self, prompt_batches: Sequence[PromptBatch]) -> Rollouts:
        """Samples responses to this rank's prompts (`_generate`), scores them (`_score`) and evaluates them under
        policy, critic and reference.

        Returns the global rollouts of all ranks, on the CPU, in the prompts' order; `types.Rollouts` lists the keys
        up to `rewards`.
        """
        step, args = self.state.global_step, self.args
        hook_checks.check_full_softmax(self.sampling_params)
        sampling_params = replace(self.sampling_params, seed=args.seed, step=step)
        passes = RolloutPasses(
            with_policy=self.sampler_check.recomputes(step),
            with_critic=args.uses_critic,
            with_entropies=metrics.logs_entropies(step),
            greedy_baseline=ADV_ESTIMATORS.trait(args.adv_estimator, "needs_greedy_baseline"),
            compares_group=ADV_ESTIMATORS.trait(args.adv_estimator, "needs_group"),
            may_fail=sampling_params.sampling_round > 0,
        )
        rollouts = self.sample_rollouts(prompt_batches, sampling_params, passes)
        self.sampler_check.check_rollouts(rollouts)
        return rollouts

    def sample_rollouts(
        self,
        prompt_batches: Sequence[PromptBatch],
        sampling_params: SamplingParams,
        passes: RolloutPasses,
        measure: Measure | None = None,
    ) -> Rollouts:
        """The global rollouts of a step or an evaluation. `measure` adds tensors to this rank's scored samples."""
        n = sampling_params.num_return_sequences
        count = sum(len(batch["rows"]) for batch in prompt_batches)
        self.collector.sync()
        prompts = self.collector.local_prompts(prompt_batches, self.dummy_prompts)
        local = None
        shown = self.run_log.bar.phase("sampling", count * (n + passes.greedy_baseline))
        with shown, self.preemption.rollout(can_stop=self.progress.is_current):
            rows: dict[str, Tensor] = {}
            if prompts is not None:
                rows = self._generate_and_score(prompts, sampling_params, measure)
                if passes.greedy_baseline:
                    greedy = replace(sampling_params, do_sample=False, num_return_sequences=1)
                    baseline = self._generate_and_score(prompts, greedy)
                    add_baseline(rows, baseline, sequence_scores(baseline["rewards"]))
                with self.timers.measure("logprobs"):
                    rows |= self.collector.evaluate(rows, passes, temperature=sampling_params.temperature)
            local = {key: value[: count * n] for key, value in rows.items() if count}
        rollouts = self.collector.gather(local, samples_per_prompt=n)
        failures = [failure for failure in self.collector.scorer.pop_failures() if (failure.row or 0) < count * n]
        if "trained_rows" in rollouts:
            report = leave_out_failures(
                rollouts, failures, self.accelerator, compares_group=passes.compares_group, may_fail=passes.may_fail
            )
            if report:
                self.run_log.message(report)
        of_ranks = collectives.gather_list(self.collector.scorer.logged.pop(), self.accelerator)
        self.logged = merged([self.logged, *of_ranks])
        return rollouts

    def logged_means(self) -> dict[str, float]:
        """The means of what reward functions have logged on all ranks since the last call."""
        logged, self.logged = self.logged, {}
        return {f"reward/{name}": total / number for name, (total, number) in logged.items()}

    def _generate_and_score(
        self, prompts: PromptBatch, sampling_params: SamplingParams, measure: Measure | None = None
    ) -> dict[str, Tensor]:
        """Checked samples of this rank's prompts with their scores, on the CPU."""
        rows = [row for row in prompts["rows"] for _ in range(sampling_params.num_return_sequences)]
        with ExitStack() as stack:
            if self.environments is not None:
                begun = self.environments.episodes(prompts, sampling_params, self.preemption.poll)
                with self.timers.measure("environments"):
                    episodes = self._episodes = stack.enter_context(begun)
                stack.callback(setattr, self, "_episodes", None)
                rows, prompts, sampling_params = episodes.rows, episodes.prompts, episodes.sampling_params
            with self.timers.measure("rollout"):
                samples = self._generate(prompts, sampling_params)
            samples = hook_checks.complete_samples(samples, prompts, sampling_params)
            self.preemption.poll()
            with self.timers.measure("score"):
                scores = self._score(samples, rows)
                scored = hook_checks.check_scores(scores, samples, num_sources=len(self.collector.scorer.names))
                if self.environments is not None and self.environments.reward_per_token:
                    scored["rewards"] = per_token(scored["rewards"], samples["response_mask"])
                return samples | scored | ({} if measure is None else measure(samples | scored, rows))

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
        with self.run_log.bar.phase("sampling") as count_rows:
            return self.collector.sample(prompts, sampling_params, self._episodes, count_rows)

    def _score(self, samples: dict[str, Tensor], rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Scores finished responses with the run's reward sources.

        Args:
            samples: the checked samples of C responses: what `_generate` returned, with `queries`, `query_attn_masks`,
                `prompt_ids` and `sample_ids` added.
            rows: the dataset's row of each of them.

        Returns:
            `scores` (C,) float32, before any penalty; `rewards` (C,), or (C, R) with each token's reward in the column
            of the token; `scores_by_source` (C, sources).
        """
        return score_responses(self.collector.scorer, self.processing_class, samples, rows, penalties=self.penalties)

    def collate(self, prompts: PromptDataset, indices: Sequence[int]) -> list[PromptBatch]:
        """This rank's share of `prompts[indices]` as a batch; an empty list if it has none."""
        share = collectives.rank_share(indices, self.accelerator)
        return [self.prompt_batch([prompts[i] for i in share], share)] if share else []

    def prompt_batch(self, items: Sequence[Any], prompt_ids: Sequence[int]) -> PromptBatch:
        """`items` of a `PromptDataset` as one batch, left-padded to `query_len`."""
        pad = self.sampling_params.pad_token_id
        return collate_prompts(items, prompt_ids, pad_token_id=pad, query_len=self.args.query_len)

    def dummy_prompts(self, count: int) -> PromptBatch:
        """Dummy prompts for a rank that has fewer prompts than another, so that all ranks make the same passes."""
        return self.prompt_batch([self.train_prompts[0]] * count, [0] * count)
