"""`Evaluator`: what an evaluation makes of the responses to an eval set: their table, their metrics, and a comparison
with those of `eval_opponent`.

The statistics, judges and stored answers are in `evaluation`; `RolloutTrainer.evaluate` samples the responses.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data import PromptDataset
from alpaca_ppo.distributed import collectives
from alpaca_ppo.evaluation.comparisons import REFERENCE, Comparison, compare, stored_answers
from alpaca_ppo.evaluation.settings import EvaluationSettings
from alpaca_ppo.evaluation.summary import ResponseRecord, correctness, summarize
from alpaca_ppo.functional.shaping import sequence_scores
from alpaca_ppo.generation.responses import SamplingParams
from alpaca_ppo.ppo import metrics
from alpaca_ppo.ppo.minibatches import with_reward
from alpaca_ppo.ppo.rollouts import RolloutCollector, sample_responses
from alpaca_ppo.rewards.scorer import response_texts, scorer_arguments
from alpaca_ppo.tracking import rollout_tables
from alpaca_ppo.types import PromptBatch, Rollouts

Measure = Callable[[Mapping[str, Tensor], list[dict[str, Any]]], dict[str, Tensor]]
"""From this rank's samples and the dataset row of each to further tensors with one entry per row."""


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


def evaluation_sampling_params(sampling_params: SamplingParams, args: PPOConfig) -> SamplingParams:
    """How the policy is sampled in evaluation: greedy unless `eval_temperature`, with the same random numbers each
    time.
    """
    return replace(
        sampling_params,
        seed=args.seed + 1,
        step=0,
        num_return_sequences=args.eval_num_samples,
        temperature=args.eval_temperature or sampling_params.temperature,
        do_sample=args.eval_temperature > 0,
        top_k=args.eval_top_k,
        top_p=args.eval_top_p,
    )
