"""`RolloutTrainer`: the rollouts of a step or an evaluation: which prompts, their samples, scores and log-probs.

What a step learns from them is in `ppo_trainer`; the passes themselves are in `ppo.rollouts`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

from torch import Tensor

from alpaca_ppo.data import PromptDataset, collate_prompts
from alpaca_ppo.data.schedule import StepPrompts
from alpaca_ppo.distributed import collectives
from alpaca_ppo.distributed.preemption import RolloutPoll
from alpaca_ppo.functional.shaping import sequence_scores
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.ppo import hook_checks, metrics
from alpaca_ppo.ppo.advantages import rollout_passes
from alpaca_ppo.ppo.curriculum import learnable_weights
from alpaca_ppo.ppo.dropped_rows import add_baseline
from alpaca_ppo.ppo.dynamic_sampling import replace_uninformative
from alpaca_ppo.ppo.metrics import RolloutCounts
from alpaca_ppo.ppo.mismatch import MismatchGuard, spread_by_length
from alpaca_ppo.ppo.rollouts import RolloutCollector, RolloutPasses
from alpaca_ppo.registry import GENERATION_BACKENDS
from alpaca_ppo.rewards.early_calls import EarlyCalls
from alpaca_ppo.rewards.scoring import early_calls, score_responses
from alpaca_ppo.tracking import rollout_tables
from alpaca_ppo.trainer import setup
from alpaca_ppo.trainer.base_trainer import BaseTrainer
from alpaca_ppo.types import PromptBatch, Rollouts


class RolloutTrainer(BaseTrainer):
    """Samples and scores the responses of a run. A subclass learns from them (`step`)."""

    collector: RolloutCollector
    sampling_params: SamplingParams
    mismatch_guard: MismatchGuard

    def set_up_run(self, callbacks: Sequence[Any]) -> None:
        """Also sets up what a rollout records and how it is interrupted."""
        super().set_up_run(callbacks)
        self.timers, self.rollout_poll, self.counts = metrics.Timers(), RolloutPoll(), RolloutCounts()
        self._early: EarlyCalls | None = None
        self.collector.scorer.interruptible_call = lambda: self.rollout_poll.interruptible_call()

    def check_sampler(self) -> None:
        """Compares sampler and trainer on a few short responses, unless `rollout` or `_generate` is overridden: a
        subclass may sample in another way.

        Raises:
            ValueError: if the two disagree and `mismatch_action` is stop.
        """
        hooks = (self.rollout, self._generate)
        inherited = hooks == (MethodType(RolloutTrainer.rollout, self), MethodType(RolloutTrainer._generate, self))
        if self.mismatch_guard.active and inherited:
            prompts = self.spread_prompts(self.state.global_step)
            self.mismatch_guard.check_short_responses(self.collector, prompts, self.sampling_params)

    def prompt_batches(self, step: int) -> list[PromptBatch]:
        """This rank's prompts of `step` (from 0): one batch, or an empty list if the step has fewer prompts than
        there are ranks.
        """
        return self.collate(self.train_prompts, self.step_prompts(step).indices)

    def step_prompts(self, step: int) -> StepPrompts:
        """The dataset indices of `step` (from 0), on all ranks."""
        chances = None
        if self.args.curriculum:
            chances = self.pass_rates.chances(self._prompt_weights(self.pass_rates.rates.clone()))
        return self.schedule.prompts_of(step, self.progress.extra_prompts(step), chances)

    def _prompt_weights(self, pass_rates: Tensor) -> Tensor:
        """With `curriculum`: how likely each of the dataset's N prompts is to be drawn next, as weights of any scale.

        Override it for another curriculum. What it returns must be the same on every rank, and in a run that is
        resumed: a function of its argument alone.

        Args:
            pass_rates: (N,) float64, from 0 to 1, or NaN for prompts that have not been sampled yet.

        Returns:
            (N,) of at least 0; weights below a hundredth of the largest count as that, so if all are 0, all prompts are
            equally likely.
        """
        return learnable_weights(pass_rates)

    def step_rollouts(self, prompt_batches: Sequence[PromptBatch]) -> Rollouts:
        """The global rollouts of a step (`rollout`), in which fresh prompts have taken the places of those without
        spread (`dynamic_sampling`).
        """
        rollouts = self.rollout(prompt_batches)
        hook_checks.check_rollouts(rollouts)
        if not (self.args.dynamic_sampling or self.args.curriculum):
            return rollouts
        prompts = self.step_prompts(self.state.global_step)
        rounds = self.args.max_sampling_rounds if self.args.dynamic_sampling else 0
        return replace_uninformative(
            rollouts, prompts, self._redraw, args=self.args, max_rounds=rounds, counts=self.counts
        )

    @contextmanager
    def in_sampling_round(self, number: int) -> Iterator[None]:
        """A block whose responses have the random numbers of another round of the step."""
        of_step = self.sampling_params
        self.sampling_params = replace(of_step, sampling_round=number)
        try:
            yield
        finally:
            self.sampling_params = of_step

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
        inherited = hooks == (MethodType(RolloutTrainer._generate, self), MethodType(RolloutTrainer._score, self))
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

    def spread_prompts(self, step: int) -> PromptBatch:
        """At most 4 of the first prompts of `step`, of lengths as different as possible; the same on every rank."""
        ids = self.step_prompts(step).indices[:16]
        items = [self.train_prompts[i] for i in ids]
        chosen = spread_by_length([len(item["input_ids"]) for item in items], count=4)
        return self.prompt_batch([items[i] for i in chosen], [ids[i] for i in chosen])

    def collate(self, prompts: PromptDataset, indices: Sequence[int]) -> list[PromptBatch]:
        """This rank's share of `prompts[indices]` as a batch; an empty list if it has none."""
        share = collectives.rank_share(indices, self.accelerator)
        return [self.prompt_batch([prompts[i] for i in share], share)] if share else []

    def prompt_batch(self, items: Sequence[Any], prompt_ids: Sequence[int]) -> PromptBatch:
        """`items` of a `PromptDataset` as one batch, left-padded to `query_len`."""
        pad = self.sampling_params.pad_token_id
        lengths = {"query_len": self.args.query_len, "privileged_len": self.args.privileged_len}
        return collate_prompts(items, prompt_ids, pad_token_id=pad, **lengths)

    def dummy_prompts(self, count: int) -> PromptBatch:
        """Dummy prompts for a rank that has fewer prompts than another, so that all ranks make the same passes."""
        return self.prompt_batch([self.train_prompts[0]] * count, [0] * count)
