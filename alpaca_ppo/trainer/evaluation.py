"""`EvaluatingTrainer`: the answers from which no step learns: of evaluations, of prompts followed through training, and
of `generate`. `Evaluator` makes table and metrics of the answers to an eval set, and compares them with others.

The statistics, judges and stored answers are in `evaluation`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from alpaca_ppo.data import PromptDataset, collate_prompts
from alpaca_ppo.data.prompts import tokenize_prompts
from alpaca_ppo.distributed import collectives
from alpaca_ppo.distributed.random_states import kept_random_states, seed_random_states
from alpaca_ppo.evaluation.comparisons import REFERENCE, Comparison, compare, stored_answers
from alpaca_ppo.evaluation.settings import EvaluationSettings
from alpaca_ppo.evaluation.summary import ResponseRecord, correctness, summarize
from alpaca_ppo.functional.shaping import sequence_scores
from alpaca_ppo.generation.responses import SamplingParams
from alpaca_ppo.models.loading import check_lengths
from alpaca_ppo.ppo import hook_checks, metrics
from alpaca_ppo.ppo.minibatches import with_reward
from alpaca_ppo.ppo.rollouts import RolloutCollector, RolloutPasses, sample_responses
from alpaca_ppo.rewards.scorer import response_texts, scorer_arguments
from alpaca_ppo.tracking import rollout_tables
from alpaca_ppo.trainer.inspected_prompts import TrainingPromptInspector, add_tokens, evaluated
from alpaca_ppo.trainer.rollout_trainer import RolloutTrainer
from alpaca_ppo.types import PromptBatch, Rollouts

Prompt = str | list[dict[str, Any]]


class Evaluator:
    """Evaluates responses to eval sets.

    Args:
        settings: what is computed.
        collector: whose reference, reward sources and metric functions are used.
        processing_class: the policy's tokenizer.
    """

    def __init__(self, settings: EvaluationSettings, collector: RolloutCollector, processing_class: Any) -> None:
        self.settings, self._collector, self._processing_class = settings, collector, processing_class
        self._opponents: dict[str, list[tuple[str, float]]] = {}
        """The opponent's answer to each prompt of an eval set, with its score: the same ones for the whole run."""
        self.answers: list[dict[str, Any]] = []
        """Prompt, response, set and scores of the last evaluation; `stored_answers` reads the first two."""

    def evaluate(
        self,
        eval_set: str,
        prompts: PromptDataset,
        rollouts: Rollouts,
        own_prompts: Callable[[], PromptBatch | None],
        params: SamplingParams,
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Returns the table and the metrics of an eval set, and adds to `answers`. Every rank must call it.

        Args:
            eval_set: its name.
            prompts: of the set.
            rollouts: of all ranks.
            own_prompts: returns this rank's share of the prompts, for the reference to answer.
            params: how the rollouts were sampled.
        """
        stats, rollouts = metrics.evaluation_stats(rollouts), with_reward(rollouts)
        records = self._records(rollouts)
        if self.settings.compares:
            if eval_set not in self._opponents:
                self._opponents[eval_set] = self._opponent(prompts, own_prompts, params)
            self._compare(prompts, records, self._opponents[eval_set])
        table = rollout_tables.evaluation_rows(rollouts, self._processing_class)
        for entry, record in zip(table, records, strict=True):
            columns, prompt = self._columns(record), prompts[record.prompt_id]["row"]["prompt"]
            entry |= columns
            answer = {"prompt": prompt, "response": record.response, "set": eval_set}
            self.answers.append(answer | {"scores": rollout_tables.rounded(record.values["scores"])} | columns)
        rollout_tables.add_columns(table, prompts, self._collector.args.prompt_column)
        return table, summarize(records, self.settings) | stats

    def measure(self, samples: Mapping[str, Tensor], rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """`metrics` (B, metrics), NaN where a function returned None or failed."""
        scored = self._collector.metric_scorer(**scorer_arguments(self._processing_class, samples, rows)).by_source
        return {"metrics": torch.stack(list(scored.values()), dim=1)}

    def _records(self, rollouts: Rollouts) -> list[ResponseRecord]:
        found: Any = rollouts
        columns = [rollouts["scores"].unsqueeze(1), sequence_scores(rollouts["rewards"]).unsqueeze(1)]
        columns += [rollouts["scores_by_source"], *([found["metrics"]] if "metrics" in found else [])]
        values = torch.cat([column.double() for column in columns], dim=1).tolist()
        names, texts = self.settings.names, response_texts(self._processing_class, rollouts)[1]
        return [
            ResponseRecord(prompt, dict(zip(names, row, strict=True)), text)
            for prompt, row, text in zip(rollouts["prompt_ids"].tolist(), values, texts, strict=True)
        ]

    def _columns(self, record: ResponseRecord) -> dict[str, Any]:
        """What the table shows of a response beside its score."""
        names = [name for name in self.settings.names if name not in ("scores", "rewards")]
        shown: dict[str, Any] = {name: rollout_tables.rounded(record.values[name]) for name in names}
        if (correct := correctness(record, self.settings)) is not None:
            shown["correct"] = bool(correct)
        return shown | ({"opponent": record.opponent, "win": record.win} if self.settings.compares else {})

    def _compare(
        self, prompts: PromptDataset, records: Sequence[ResponseRecord], opponent: Sequence[tuple[str, float]]
    ) -> None:
        """Sets the win, the opponent's answer and the difference in length of each of the `records`."""
        pairs, judge = [], self.settings.judge
        for record in records:
            record.opponent, theirs = opponent[record.prompt_id]
            record.length_difference = float(len(record.response) - len(record.opponent))
            if self.settings.judged_by is None:
                columns = dict(prompts[record.prompt_id]["row"])
                pairs.append(Comparison(columns.pop("prompt"), record.response, record.opponent, columns))
            else:
                mine = record.values[self.settings.judged_by]
                record.win = None if math.isnan(mine + theirs) else compare(mine, theirs)
        if judge is not None and pairs:
            wins = collectives.on_main_process(lambda: judge(pairs), self._collector.accelerator)
            for record, win in zip(records, wins, strict=True):
                record.win = win

    def _opponent(
        self, prompts: PromptDataset, own_prompts: Callable[[], PromptBatch | None], params: SamplingParams
    ) -> list[tuple[str, float]]:
        """The opponent's answer to each of `prompts`, with what the judging score gives it: NaN where it fails or
        returns None, and without one.
        """
        name, opponent = self.settings.judged_by, str(self._collector.args.eval_opponent)
        rows, accelerator = [prompts[i]["row"] for i in range(len(prompts))], self._collector.accelerator
        if opponent == REFERENCE:
            answers = self._in_order(self._reference_answers(own_prompts(), params), len(rows))
        else:
            texts = stored_answers(opponent, rows)
            # The tokens that the policy's tokenizer makes of them.
            ids = self._processing_class(texts, add_special_tokens=False)["input_ids"]
            answers = list(zip(ids, texts, strict=True))
        if name is None:
            return [(text, math.nan) for _, text in answers]
        share = list(collectives.rank_share(range(len(rows)), accelerator))
        if self._collector.engine.synced_forwards:
            share += [0] * (collectives.max_int_over_ranks(len(share), accelerator) - len(share))
        from_rewards = name == "scores" or name.startswith("scores/")
        scorer = self._collector.scorer if from_rewards else self._collector.metric_scorer
        own = [rows[i] for i in share]
        result = scorer(
            [row["prompt"] for row in own], [answers[i][1] for i in share], [answers[i][0] for i in share], own
        )
        failed = set(result.failures)
        scorer.pop_failures()
        # What functions log about the opponent is not about the next step.
        scorer.logged.pop()
        found = result.by_source[name.removeprefix("scores/")] if name != "scores" else sequence_scores(result.rewards)
        scores = [math.nan if i in failed else value for i, value in enumerate(found.tolist())]
        return [(text, score) for (_, text), score in zip(answers, self._in_order(scores, len(rows)), strict=True)]

    def _reference_answers(self, own_prompts: PromptBatch | None, params: SamplingParams) -> list[tuple[Any, str]]:
        """One response of the reference to each of this rank's prompts, as tokens and text, with the random numbers of
        the policy's first.
        """
        collector = self._collector
        if own_prompts is None:
            return []
        assert collector.reference is not None
        with (
            collector.reference.on_device(collector.accelerator.device) as policy,
            collector.engine.autocast(),
            collector.engine.sampling(policy) as model,
        ):
            samples = sample_responses(
                model,
                own_prompts,
                replace(params, num_return_sequences=1),
                # A sampler with weights of its own has those of the policy.
                backend="auto" if collector.backend.has_own_weights else collector.backend,
                per_device_batch_size=collector.args.rollout_per_device_batch_size,
            )
        return list(zip(*response_texts(self._processing_class, samples), strict=True))

    def _in_order(self, share: list[Any], count: int) -> list[Any]:
        """What every rank has for its own prompts, in the order of all; a rank's dummies come after its own."""
        parts = collectives.gather_list(share, self._collector.accelerator)
        return [parts[i % len(parts)][i // len(parts)] for i in range(count)]


class EvaluatingTrainer(RolloutTrainer):
    """The answers from which no step learns: of evaluations, of prompts followed through training, of `generate`."""

    evaluator: Evaluator

    def built_in_callbacks(self) -> list[TrainerCallback]:
        """Also the one that answers training prompts for the report's inspector."""
        follows = self.args.num_inspected_prompts and not self.eval_prompts and self.environments is None
        inspectors: list[TrainerCallback] = [TrainingPromptInspector(self.answer_inspected_prompts)] if follows else []
        return [*inspectors, *super().built_in_callbacks()]

    def evaluate(self) -> dict[str, float]:
        """Greedy (or sampled, `eval_temperature`) responses to the eval prompts: reward, length and KL to the reference
        as `eval/*`, or `eval/<set>/*` of each of several eval sets; docs/evaluation.md has the rest.

        If `failed_rewards: mask` leaves no response, all of them but `eval/masked_rows` are NaN.

        Sampled evaluations use the same random numbers each time, so that differences come from the policy, and the
        global random generators are left as they were. The table goes to eval/step_*.jsonl; called before `train`, it
        does not replace one that a run with checkpoints has left there.

        Raises:
            ValueError: when the trainer has no eval dataset.
        """
        if not self.eval_prompts:
            raise ValueError("evaluate() needs prompts, but eval_dataset is None; pass eval_dataset to PPOTrainer")
        # What a training loop of one's own has measured so far is for the step's record.
        of_step, timers = self.logged, self.timers
        self.logged, self.timers = {}, self.new_timers()
        with self.run_lock.held(), kept_random_states():
            if self.environments is not None:
                # Those that draw their tasks from the global generators have the same ones each time.
                seed_random_states(self.args.seed, self.accelerator.process_index)
            self.evaluator.answers.clear()
            stats: dict[str, float] = {}
            for name in self.eval_prompts:
                stats |= self._evaluate_set(name)
        stats["time/eval"] = sum(self.timers.seconds.values())
        self.logged, self.timers = of_step, timers
        return stats

    def _evaluate_set(self, name: str) -> dict[str, float]:
        """Evaluates the eval set `name` and writes its table."""
        folder, prompts = f"eval/{name}" if name else "eval", self.eval_prompts[name]
        args, of_step = self.args, self.sampling_params
        # The same random numbers each time, whatever the step.
        params = replace(
            of_step,
            seed=args.seed + 1,
            step=0,
            num_return_sequences=args.eval_num_samples,
            temperature=args.eval_temperature or of_step.temperature,
            do_sample=args.eval_temperature > 0,
            top_k=args.eval_top_k,
            top_p=args.eval_top_p,
        )
        batches, passes = self.collate(prompts, range(len(prompts))), RolloutPasses(with_critic=False, may_fail=True)
        measure = self.evaluator.measure if self.collector.metric_scorer.sources else None
        rollouts = self.sample_rollouts(batches, params, passes, measure)
        for failure in self.collector.metric_scorer.pop_failures():
            self.run_log.message(f"not measured: {failure}")
        own_prompts = partial(self.collector.local_prompts, batches, self.dummy_prompts)
        table, stats = self.evaluator.evaluate(name, prompts, rollouts, own_prompts, params)
        if name == next(iter(self.eval_prompts)):
            add_tokens(self.collector, self.processing_class, rollouts, table)
        self.run_log.log_table(folder, table, self.state.global_step)
        return {f"{folder}/{metric}": value for metric, value in (stats | self.logged_means()).items()}

    def answer_inspected_prompts(self, step: int) -> None:
        """Writes the table of the policy's greedy answers to the first `num_inspected_prompts` training prompts, which
        are not scored: a reward function may count its calls, or cost money. The global random generators are left as
        they were.
        """
        ids = range(min(self.args.num_inspected_prompts, len(self.train_prompts)))
        batch = self.prompt_batch([self.train_prompts[i] for i in ids], ids)
        params = replace(self.sampling_params, do_sample=False, num_return_sequences=1)
        rollouts: Any = None
        # A signal leaves the inner block, and `poll` raises on every rank if one of them was stopped.
        with kept_random_states(), self.preemption.rollout(can_stop=self.progress.is_current):
            samples = hook_checks.complete_samples(self._generate(batch, params), batch, params)
            unscored = {"scores": torch.full((len(ids),), torch.nan)}
            rollouts = samples | evaluated(self.collector, samples) | unscored
        self.poll()
        rows = rollout_tables.rollout_rows(rollouts, self.processing_class)
        rollout_tables.add_columns(rows, self.train_prompts, self.args.prompt_column)
        self.run_log.log_table("inspected", rows, step)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        num_return_sequences: int = 1,
        do_sample: bool = True,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> list[list[str]]:
        """Returns the policy's answers to each prompt as text, as it is now; nothing is scored or recorded.

        The same seed gives the same answers, and no random number of the run is touched. Each process samples what it
        is given: under DDP and ZeRO 1 or 2 one of them may call this alone, under ZeRO 3 all must, with the same
        prompts, and so must they where the sampler has weights of its own.

        Args:
            prompts: one prompt or several: texts, or conversations (lists of messages), to which the chat template is
                applied.
            num_return_sequences: answers to each prompt.
            do_sample: False takes the most likely token each time.
            max_new_tokens: tokens of an answer; None = `response_len`.
            temperature: None = that of the run.
            top_k: sample from the k most likely tokens only.
            top_p: sample only from the most likely tokens that together reach this probability.
            seed: of the random numbers.

        Raises:
            ValueError: if there are no prompts, texts and conversations are mixed, a prompt has no tokens, prompt and
                response are longer than the model's positions, or a number is outside its range.
        """
        one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], Mapping))
        texts: list[Any] = [prompts] if one else list(prompts)
        if not texts or any(type(text) is not type(texts[0]) for text in texts):
            raise ValueError(
                f"prompts is {texts!r:.200}; give at least one, and either texts or conversations (lists of messages)"
            )
        lengths = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        given: dict[str, Any] = {name: value for name, value in lengths.items() if value is not None}
        given |= {"num_return_sequences": num_return_sequences, "do_sample": do_sample, "seed": seed}
        params = replace(self.sampling_params, step=0, sampling_round=0, **given)
        ids = tokenize_prompts(texts, self.processing_class, self.args.chat_template_kwargs)
        query_len = max(map(len, ids))
        check_lengths(
            self.actor_critic.policy.model.config, {"the prompt": query_len, "max_new_tokens": params.max_new_tokens}
        )
        items = [{"input_ids": own, "row": {}} for own in ids]
        batch = collate_prompts(items, range(len(ids)), pad_token_id=params.pad_token_id, query_len=query_len)
        self.collector.sync()
        samples = self.collector.sample(batch, params)
        rows = zip(samples["responses"], samples["response_mask"], strict=True)
        answers = self.processing_class.batch_decode(
            [row[mask].tolist() for row, mask in rows], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return [answers[i : i + num_return_sequences] for i in range(0, len(answers), num_return_sequences)]
