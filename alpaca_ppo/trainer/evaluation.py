"""`Evaluator`: responses to the eval sets, their tables and metrics, comparisons with an opponent; other answers.

The statistics, judges and stored answers are in `evaluation`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from alpaca_ppo.control_tokens import continuing
from alpaca_ppo.data import PromptDataset, collate_prompts
from alpaca_ppo.data.prompts import tokenize_prompts
from alpaca_ppo.distributed import collectives
from alpaca_ppo.distributed.random_states import seed_random_states
from alpaca_ppo.evaluation.comparisons import REFERENCE, compare, stored_answers
from alpaca_ppo.evaluation.summary import ResponseRecord, correctness, summarize
from alpaca_ppo.functional.shaping import sequence_scores
from alpaca_ppo.generation.responses import SamplingParams
from alpaca_ppo.models.loading import check_lengths
from alpaca_ppo.ppo import metrics
from alpaca_ppo.ppo.rollouts import RolloutOptions, sample_responses
from alpaca_ppo.ppo.row_masks import with_reward
from alpaca_ppo.rewards.scorer import response_texts, scorer_arguments
from alpaca_ppo.tracking import rollout_tables
from alpaca_ppo.trainer.inspected_prompts import add_tokens
from alpaca_ppo.trainer.setup import RunParts, make_step_record
from alpaca_ppo.types import PromptBatch, Rollouts

Prompt = str | list[dict[str, Any]]
Measure = Callable[[Mapping[str, Tensor], list[dict[str, Any]]], dict[str, Tensor]]
"""From this rank's samples and their dataset rows to further tensors with one entry per row."""


class Evaluator:
    """Evaluates the policy on the eval sets of a run.

    Args:
        rollout: `PPOTrainer.collect_rollouts`.

    Attributes:
        settings: what is computed.
        answers: of the last evaluation, each with `prompt`, `response`, `set`, `scores` and what `_columns` returns.
    """

    def __init__(self, parts: RunParts, rollout: Callable[..., Rollouts]) -> None:
        self.settings, self._parts, self._rollout = parts.evaluation, parts, rollout
        self._collector, self._processing_class = parts.collector, parts.processing_class
        # Of each eval set, the opponent's answers with their scores, which stay the same for the whole run.
        self._opponents: dict[str, list[tuple[str, float]]] = {}
        self.answers: list[dict[str, Any]] = []

    def run(self, step: int) -> dict[str, float]:
        """Returns the metrics of all eval sets after `step` steps and writes their tables. Every rank must call it."""
        args, accelerator = self._collector.args, self._collector.accelerator
        if self._parts.environments is not None:
            # So that environments that draw tasks from the global generators draw the same ones each time.
            seed_random_states(args.seed, accelerator.process_index)
        self.answers.clear()
        stats: dict[str, float] = {}
        seconds = 0.0
        for name in self._parts.eval_prompts:
            record = make_step_record(self._parts.run_log)
            folder = f"eval/{name}" if name else "eval"
            measured = self._evaluate_set(name, folder, step, record) | record.logged_means()
            stats |= {f"{folder}/{metric}": value for metric, value in measured.items()}
            seconds += sum(record.seconds.values())
        return stats | {"time/eval": seconds}

    def answer_texts(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams) -> list[list[str]]:
        """The policy's answers to each of `prompts`, written as those of training are; see `PPOTrainer.generate`."""
        collector = self._collector
        given = prompts if isinstance(prompts, Sequence) else []
        is_one = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], Mapping))
        several: list[Any] = [given] if is_one else [*given]
        if not several or any(type(prompt) is not type(several[0]) for prompt in several):
            raise ValueError(f"prompts is {prompts!r:.200}; give one or more texts, or lists of messages")
        trained = self._parts.train_prompts
        if trained.are_messages and isinstance(several[0], str):
            several = [[{"role": "user", "content": text}] for text in several]
        form = replace(trained.form, prompt_column="prompt", prompt_template=None, user_template=None)
        several = [form.prompt_of({"prompt": prompt}) for prompt in several]
        ids = tokenize_prompts(several, self._processing_class, [form.chat_template_kwargs or {}] * len(several))
        query_len = max(map(len, ids))
        model = collector.engine.actor_critic.policy.model
        check_lengths(model.config, {"the prompt": query_len, "max_new_tokens": params.max_new_tokens})
        items = [{"input_ids": tokens, "row": {}} for tokens in ids]
        batch = collate_prompts(items, range(len(ids)), pad_token_id=params.pad_token_id, query_len=query_len)
        collector.sync()
        samples = collector.sample(batch, params)
        _, answers = response_texts(self._processing_class, samples)
        n = params.num_return_sequences
        return [answers[i : i + n] for i in range(0, len(answers), n)]

    def _evaluate_set(self, name: str, folder: str, step: int, record: metrics.StepRecord) -> dict[str, float]:
        """Returns the metrics of the eval set `name`, but for what functions log, and writes its table to `folder`."""
        collector, args, prompts = self._collector, self._collector.args, self._parts.eval_prompts[name]
        # With the same random numbers at every step.
        params = replace(
            self._parts.sampling_params,
            seed=args.seed + 1,
            num_return_sequences=args.eval_num_samples,
            temperature=args.eval_temperature or self._parts.sampling_params.temperature,
            do_sample=args.eval_temperature > 0,
            top_k=args.eval_top_k,
            top_p=args.eval_top_p,
        )
        batches = collector.collate(prompts, range(len(prompts)))
        options = RolloutOptions(with_critic=False, may_fail=True)
        measure = self._measure if collector.metric_scorer.sources else None
        all_rollouts = self._rollout(batches, params, options, record, measure)
        for failure in collector.metric_scorer.pop_failures():
            self._parts.run_log.message(f"not measured: {failure}")
        rollouts = with_reward(all_rollouts)
        records = self._records(rollouts)
        if self.settings.compares:
            if name not in self._opponents:
                # Batches of its own, since hooks of the rollout may have changed the others.
                batches = collector.collate(prompts, range(len(prompts)))
                self._opponents[name] = self._opponent(prompts, batches, params)
            self._compare(prompts, records, self._opponents[name])
        self._log_table(name, folder, step, rollouts, records)
        dropped = {"dropped_prompts": float(prompts.num_dropped)} if prompts.num_dropped else {}
        return summarize(records, self.settings) | metrics.evaluation_stats(all_rollouts) | dropped

    def _log_table(self, name: str, folder: str, step: int, rollouts: Rollouts, records: list[ResponseRecord]) -> None:
        """Writes the table of the eval set `name`, with tokens if it is the first; adds its responses to `answers`."""
        prompts = self._parts.eval_prompts[name]
        table = rollout_tables.evaluation_rows(rollouts, self._processing_class)
        for entry, response in zip(table, records, strict=True):
            columns = self._columns(response)
            entry |= columns
            answer = {
                "prompt": prompts[response.prompt_id]["row"]["prompt"],
                "response": response.response,
                "set": name,
                "scores": rollout_tables.rounded(response.values["scores"]),
            }
            self.answers.append(answer | columns)
        rollout_tables.add_columns(table, prompts, self._collector.args.prompt_column)
        if name == next(iter(self._parts.eval_prompts)):
            add_tokens(self._collector, self._processing_class, rollouts, table)
        self._parts.run_log.log_table(folder, table, step)

    def _measure(self, samples: Mapping[str, Tensor], rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """`metrics` (B, metrics), NaN where a function returned None or failed."""
        scored = self._collector.metric_scorer(**scorer_arguments(self._processing_class, samples, rows)).by_source
        return {"metrics": torch.stack(list(scored.values()), dim=1)}

    def _records(self, rollouts: Rollouts) -> list[ResponseRecord]:
        """The responses, with their scores, rewards and metrics by name."""
        tensors = dict[str, Any](rollouts)
        rewards = sequence_scores(rollouts["rewards"])
        columns = [rollouts["scores"].unsqueeze(1), rewards.unsqueeze(1), rollouts["scores_by_source"]]
        if "metrics" in tensors:
            columns.append(tensors["metrics"])
        values = torch.cat([column.double() for column in columns], dim=1).tolist()
        _, texts = response_texts(self._processing_class, rollouts)
        return [
            ResponseRecord(prompt, dict(zip(self.settings.names, row, strict=True)), text)
            for prompt, row, text in zip(rollouts["prompt_ids"].tolist(), values, texts, strict=True)
        ]

    def _columns(self, record: ResponseRecord) -> dict[str, Any]:
        names = [name for name in self.settings.names if name not in ("scores", "rewards")]
        shown: dict[str, Any] = {name: rollout_tables.rounded(record.values[name]) for name in names}
        if (correct := correctness(record, self.settings)) is not None:
            shown["correct"] = bool(correct)
        if self.settings.compares:
            shown |= {"opponent": record.opponent, "win": record.win}
        return shown

    def _compare(
        self, prompts: PromptDataset, records: Sequence[ResponseRecord], opponent: Sequence[tuple[str, float]]
    ) -> None:
        """Sets the win, the opponent's answer and the difference in length of each of the `records`."""
        judge, source = self.settings.judge, self.settings.judged_by
        for record in records:
            record.opponent, opponent_score = opponent[record.prompt_id]
            record.length_difference = float(len(record.response) - len(record.opponent))
            if source is not None:
                score = record.values[source]
                record.win = None if math.isnan(score + opponent_score) else compare(score, opponent_score)
        if judge is not None and records:
            rows = [prompts[record.prompt_id]["row"] for record in records]
            own = [record.response for record in records]
            others = [opponent[record.prompt_id][0] for record in records]
            wins = collectives.on_main_process(lambda: judge(rows, own, others), self._collector.accelerator)
            for record, win in zip(records, wins, strict=True):
                record.win = win

    def _opponent(
        self, prompts: PromptDataset, batches: Sequence[PromptBatch], params: SamplingParams
    ) -> list[tuple[str, float]]:
        """The opponent's answer to each of `prompts`, of which `batches` are this rank's share, and its score by the
        source that decides (NaN without one).
        """
        opponent = str(self._collector.args.eval_opponent)
        source = self.settings.judged_by
        if opponent == REFERENCE:
            answers = self._in_order(self._reference_answers(batches, params), len(prompts))
        else:
            texts = stored_answers(opponent, [prompts[i]["row"] for i in range(len(prompts))])
            answers = list(zip(map(continuing(self._processing_class), texts), texts, strict=True))
        scores = [math.nan] * len(prompts) if source is None else self._scores_by(source, batches, answers)
        return [(text, score) for (_, text), score in zip(answers, scores, strict=True)]

    def _scores_by(
        self, source: str, batches: Sequence[PromptBatch], answers: Sequence[tuple[Any, str]]
    ) -> list[float]:
        """The scores of `answers`, tokens and text, by `source`; NaN where it fails or returns None. `batches` are this
        rank's share of the prompts.
        """
        collector, (prompts,) = self._collector, batches
        is_reward = source == "scores" or source.startswith("scores/")
        scorer = collector.scorer if is_reward else collector.metric_scorer
        own = [answers[i] for i in prompts["prompt_ids"].tolist()]
        ids, texts = [tokens for tokens, _ in own], [text for _, text in own]
        result = scorer([row["prompt"] for row in prompts["rows"]], texts, ids, prompts["rows"])
        scorer.pop_failures()
        # What functions log about the opponent does not belong to the next step.
        scorer.logged.pop()
        name = source.removeprefix("scores/")
        values = sequence_scores(result.rewards) if source == "scores" else result.by_source[name]
        scores = [math.nan if i in result.failures else value for i, value in enumerate(values.tolist())]
        return self._in_order(scores, len(answers))

    def _reference_answers(self, batches: Sequence[PromptBatch], params: SamplingParams) -> list[tuple[Any, str]]:
        """The reference's response (tokens and text) to each of this rank's prompts, sampled with the random numbers of
        the policy's first response to it.
        """
        collector, (prompts,) = self._collector, batches
        if not prompts["rows"]:
            return []
        assert collector.reference is not None
        with (
            collector.reference.on_device(collector.accelerator.device) as policy,
            collector.engine.autocast(),
            collector.engine.sampling(policy) as model,
        ):
            samples = sample_responses(
                model,
                prompts,
                replace(params, num_return_sequences=1),
                # A sampler with its own copy of the weights has those of the policy.
                backend="auto" if collector.backend.has_own_weights else collector.backend,
                per_device_batch_size=collector.args.rollout_per_device_batch_size,
            )
        return list(zip(*response_texts(self._processing_class, samples), strict=True))

    def _in_order(self, share: list[Any], count: int) -> list[Any]:
        """Gathers all ranks' entries in the order of the `count` prompts, without those of dummies."""
        parts = collectives.gather_list(share, self._collector.accelerator)
        return [parts[i % len(parts)][i // len(parts)] for i in range(count)]
