"""`Evaluator`: one evaluation of a trainer: samples the prompts of each eval set, and writes tables and metrics.

The statistics are in `evaluation`, the rollout itself is the trainer's.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alpaca_ppo.data import PromptDataset
from alpaca_ppo.evaluation.settings import make_settings
from alpaca_ppo.evaluation.summary import ResponseRecord, correctness, summarize
from alpaca_ppo.functional.shaping import sequence_scores
from alpaca_ppo.ppo import metrics
from alpaca_ppo.ppo.rollouts import RolloutPasses
from alpaca_ppo.ppo.trained_rows import with_reward
from alpaca_ppo.rewards import RewardScorer
from alpaca_ppo.rewards.scoring import response_texts, scorer_arguments
from alpaca_ppo.tracking import rollout_tables
from alpaca_ppo.trainer import setup
from alpaca_ppo.trainer.comparison import Contest
from alpaca_ppo.trainer.inspected_prompts import add_tokens
from alpaca_ppo.types import Rollouts

if TYPE_CHECKING:
    from alpaca_ppo.trainer.rollout_trainer import RolloutTrainer

Measure = Callable[[Mapping[str, Tensor], list[dict[str, Any]]], dict[str, Tensor]]
"""From this rank's samples and the dataset row of each to further tensors with one entry per row."""


class Evaluator:
    """Evaluates the policy of a `RolloutTrainer` on its eval sets.

    Args:
        trainer: whose policy, rewards and eval sets are used.
        metric_scorer: the metric functions and models; their scores do not enter the reward.

    Raises:
        ValueError: for options that name a value which there is not.
    """

    def __init__(self, trainer: "RolloutTrainer", metric_scorer: RewardScorer) -> None:
        self.trainer, self.metric_scorer = trainer, metric_scorer
        sources = trainer.collector.scorer.names
        self.settings = make_settings(trainer.args, sources=sources, metrics=metric_scorer.names)
        self._contest = None if trainer.args.eval_opponent is None else Contest(trainer, metric_scorer, self.settings)
        self.answers: list[dict[str, Any]] = []
        """Set, prompt, response and scores of the last evaluation; `evaluation.opponents` reads the first three."""
        metric_scorer.interruptible_call = lambda: trainer.preemption.part(at_once=True)

    def evaluate(self) -> dict[str, float]:
        """Returns the metrics of all eval sets: `eval/<name>` of the only one without a name, `eval/<set>/<name>` of
        the others. Writes the tables.
        """
        stats: dict[str, float] = {}
        self.answers.clear()
        for name, prompts in self.trainer.eval_prompts.items():
            folder = f"eval/{name}" if name else "eval"
            stats |= {f"{folder}/{metric}": value for metric, value in self._evaluate_set(folder, prompts).items()}
            for answer in self.answers:
                answer.setdefault("set", name)
        return stats

    def _evaluate_set(self, folder: str, prompts: PromptDataset) -> dict[str, float]:
        trainer, args = self.trainer, self.trainer.args
        trainer.counts = metrics.RolloutCounts()
        rollouts = trainer.sample_rollouts(
            trainer.collate(prompts, range(len(prompts))),
            setup.evaluation_sampling_params(trainer.sampling_params, args),
            RolloutPasses(with_critic=False, may_fail=True),
            measure=self._measure if self.metric_scorer.sources else None,
        )
        of_rewards = metrics.evaluation_stats(rollouts) | trainer.counts.logged_means()
        rollouts = with_reward(rollouts)
        rows = [prompts[i]["row"] for i in rollouts["prompt_ids"].tolist()]
        records = self._records(rollouts)
        if self._contest is not None:
            self._contest.judge(folder, prompts, records, rollouts)
        table = rollout_tables.evaluation_rows(rollouts, trainer.processing_class)
        for entry, record, row in zip(table, records, rows, strict=True):
            entry |= self._columns(record) | rollout_tables.prompt_columns(row, args.prompt_column)
        if prompts is next(iter(trainer.eval_prompts.values())):
            add_tokens(trainer, rollouts, table)
        texts = response_texts(trainer.processing_class, rollouts)[1]
        for row, text, record in zip(rows, texts, records, strict=True):
            scored = {"scores": rollout_tables.rounded(record.values["scores"])} | self._columns(record)
            answer = {"prompt": row["prompt"], "response": text}
            # Twice, so that they come first, and a metric that is called like one of them does not replace it.
            self.answers.append(answer | scored | answer)
        trainer.run_log.log_table(folder, table, trainer.state.global_step)
        return summarize(records, self.settings) | of_rewards

    def _measure(self, samples: Mapping[str, Tensor], rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """`metrics` (B, metrics), NaN where a function returned None or failed."""
        scored = self.metric_scorer(**scorer_arguments(self.trainer.processing_class, samples, rows)).by_source
        # Metrics that a function logs itself belong to steps, of which this is none.
        self.metric_scorer.logged.pop()
        for failure in self.metric_scorer.pop_failures():
            self.trainer.run_log.message(f"not measured: {failure}")
        return {"metrics": torch.stack(list(scored.values()), dim=1)}

    def _records(self, rollouts: Rollouts) -> list[ResponseRecord]:
        found: Any = rollouts
        columns = [rollouts["scores"].unsqueeze(1), sequence_scores(rollouts["rewards"]).unsqueeze(1)]
        columns += [rollouts["scores_by_source"], *([found["metrics"]] if "metrics" in found else [])]
        values = torch.cat([column.double() for column in columns], dim=1).tolist()
        names = self.settings.names
        return [
            ResponseRecord(prompt, dict(zip(names, row, strict=True)))
            for prompt, row in zip(rollouts["prompt_ids"].tolist(), values, strict=True)
        ]

    def _columns(self, record: ResponseRecord) -> dict[str, Any]:
        """What the table shows of a response beside its score."""
        names = [name for name in self.settings.names if name not in ("scores", "rewards")]
        shown: dict[str, Any] = {name: rollout_tables.rounded(record.values[name]) for name in names}
        if (correct := correctness(record, self.settings)) is not None:
            shown["correct"] = bool(correct)
        return shown | ({"opponent": record.opponent, "win": record.win} if self.settings.compares else {})
