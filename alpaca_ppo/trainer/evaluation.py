"""`Evaluator`: the evaluations of a trainer: samples the prompts of each eval set, compares the answers with those of
`eval_opponent`, and writes tables and metrics.

The statistics, judges and stored answers are in `evaluation`, the rollout itself is the trainer's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alpaca_ppo.config.modules import load_function
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data import PromptDataset
from alpaca_ppo.distributed import collectives
from alpaca_ppo.evaluation.comparisons import REFERENCE, Comparison, FunctionJudge, compare, stored_answers
from alpaca_ppo.evaluation.settings import make_settings
from alpaca_ppo.evaluation.summary import ResponseRecord, correctness, summarize
from alpaca_ppo.functional.shaping import sequence_scores
from alpaca_ppo.generation.responses import SamplingParams
from alpaca_ppo.ppo import metrics
from alpaca_ppo.ppo.minibatches import with_reward
from alpaca_ppo.ppo.rollouts import RolloutPasses, sample_responses
from alpaca_ppo.rewards.scorer import response_texts, scorer_arguments
from alpaca_ppo.tracking import rollout_tables
from alpaca_ppo.trainer.inspected_prompts import add_tokens
from alpaca_ppo.types import Rollouts

if TYPE_CHECKING:
    from alpaca_ppo.trainer.rollout_trainer import RolloutTrainer

Measure = Callable[[Mapping[str, Tensor], list[dict[str, Any]]], dict[str, Tensor]]
"""From this rank's samples and the dataset row of each to further tensors with one entry per row."""


class Evaluator:
    """Evaluates the policy of a `RolloutTrainer` on its eval sets.

    Args:
        trainer: whose policy, reference, rewards, metric functions and eval sets are used.

    Raises:
        ValueError: as `make_settings`; also if the function that `eval_judge` names cannot be loaded.
    """

    def __init__(self, trainer: "RolloutTrainer") -> None:
        self.trainer, self.metric_scorer = trainer, trainer.collector.metric_scorer
        sources = trainer.collector.scorer.names
        self.settings = make_settings(trainer.args, sources=sources, metrics=self.metric_scorer.names)
        self._judge: FunctionJudge | None = None
        if self.settings.compares and self.settings.judged_by is None:
            judge = trainer.args.eval_judge
            self._judge = FunctionJudge(load_function(judge, what="eval_judge"), name=judge)
        self._opponents: dict[str, list[tuple[str, float]]] = {}
        """The opponent's answer to each prompt of an eval set, with its score: the same ones for the whole run."""
        self.answers: list[dict[str, Any]] = []
        """Prompt, response, set and scores of the last evaluation; `stored_answers` reads the first two."""

    def evaluate(self) -> dict[str, float]:
        """Returns the metrics of all eval sets: `eval/<name>` of the only one without a name, `eval/<set>/<name>` of
        the others. Writes the tables.
        """
        stats: dict[str, float] = {}
        self.answers.clear()
        for name, prompts in self.trainer.eval_prompts.items():
            folder = f"eval/{name}" if name else "eval"
            of_set = self._evaluate_set(name, folder, prompts)
            stats |= {f"{folder}/{metric}": value for metric, value in of_set.items()}
        return stats

    def _evaluate_set(self, name: str, folder: str, prompts: PromptDataset) -> dict[str, float]:
        trainer, args = self.trainer, self.trainer.args
        trainer.counts = metrics.RolloutCounts()
        rollouts = trainer.sample_rollouts(
            trainer.collate(prompts, range(len(prompts))),
            evaluation_sampling_params(trainer.sampling_params, args),
            RolloutPasses(with_critic=False, may_fail=True),
            measure=self._measure if self.metric_scorer.sources else None,
        )
        of_rewards = metrics.evaluation_stats(rollouts) | trainer.counts.logged_means()
        rollouts = with_reward(rollouts)
        records = self._records(rollouts)
        texts = response_texts(trainer.processing_class, rollouts)[1]
        if self.settings.compares:
            self._compare(name, prompts, records, texts)
        table = rollout_tables.evaluation_rows(rollouts, trainer.processing_class)
        for entry, record, text in zip(table, records, texts, strict=True):
            row, columns = prompts[record.prompt_id]["row"], self._columns(record)
            entry |= columns | rollout_tables.prompt_columns(row, args.prompt_column)
            answer = {"prompt": row["prompt"], "response": text, "set": name}
            # Twice, so that they come first, and a metric that is called like one of them does not replace it.
            self.answers.append(answer | {"scores": rollout_tables.rounded(record.values["scores"])} | columns | answer)
        if prompts is next(iter(trainer.eval_prompts.values())):
            add_tokens(trainer, rollouts, table)
        trainer.run_log.log_table(folder, table, trainer.state.global_step)
        return summarize(records, self.settings) | of_rewards

    def _measure(self, samples: Mapping[str, Tensor], rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """`metrics` (B, metrics), NaN where a function returned None or failed."""
        scored = self.metric_scorer(**scorer_arguments(self.trainer.processing_class, samples, rows)).by_source
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

    def _compare(
        self, eval_set: str, prompts: PromptDataset, records: Sequence[ResponseRecord], texts: Sequence[str]
    ) -> None:
        """Sets the win, the opponent's answer and the difference in length of each of the `records`, whose responses
        are `texts`.
        """
        if eval_set not in self._opponents:
            self._opponents[eval_set] = self._opponent(prompts)
        pairs = []
        for record, text in zip(records, texts, strict=True):
            record.opponent, theirs = self._opponents[eval_set][record.prompt_id]
            record.length_difference = float(len(text) - len(record.opponent))
            if self.settings.judged_by is None:
                columns = dict(prompts[record.prompt_id]["row"])
                pairs.append(Comparison(columns.pop("prompt"), text, record.opponent, columns))
            else:
                mine = record.values[self.settings.judged_by]
                record.win = None if math.isnan(mine + theirs) else compare(mine, theirs)
        if pairs:
            judge = self._judge
            assert judge is not None
            wins = collectives.on_main_process(lambda: judge(pairs), self.trainer.accelerator)
            self.trainer.poll()
            for record, win in zip(records, wins, strict=True):
                record.win = win

    def _opponent(self, prompts: PromptDataset) -> list[tuple[str, float]]:
        """The opponent's answer to each of `prompts`, with what the judging score gives it: NaN where it fails or
        returns None, and without one.
        """
        trainer, name = self.trainer, self.settings.judged_by
        opponent = str(trainer.args.eval_opponent)
        if opponent == REFERENCE:
            answers = self._reference_answers(prompts)
        else:
            texts = stored_answers(opponent, [prompts[i]["row"] for i in range(len(prompts))])
            # The tokens that the policy's tokenizer makes of them.
            ids = trainer.processing_class(texts, add_special_tokens=False)["input_ids"]
            answers = list(zip(ids, texts, strict=True))
        if name is None:
            return [(text, math.nan) for _, text in answers]
        share = list(collectives.rank_share(range(len(prompts)), trainer.accelerator))
        if trainer.updater.engine.synced_forwards:
            share += [0] * (collectives.max_int_over_ranks(len(share), trainer.accelerator) - len(share))
        rows = [prompts[i]["row"] for i in share]
        from_rewards = name == "scores" or name.startswith("scores/")
        scorer = trainer.collector.scorer if from_rewards else self.metric_scorer
        result = scorer(
            [row["prompt"] for row in rows], [answers[i][1] for i in share], [answers[i][0] for i in share], rows
        )
        failed = set(result.failures)
        scorer.pop_failures()
        # What functions log about the opponent is not about the next step.
        scorer.logged.pop()
        found = result.by_source[name.removeprefix("scores/")] if name != "scores" else sequence_scores(result.rewards)
        scores = [math.nan if i in failed else value for i, value in enumerate(found.tolist())]
        return [(text, score) for (_, text), score in zip(answers, self._in_order(scores, len(prompts)), strict=True)]

    def _reference_answers(self, prompts: PromptDataset) -> list[tuple[list[int], str]]:
        """One response of the reference to each prompt, with the random numbers of the policy's first."""
        trainer = self.trainer
        engine, collector = trainer.updater.engine, trainer.collector
        params = evaluation_sampling_params(trainer.sampling_params, trainer.args)
        params = replace(params, num_return_sequences=1)
        batches = trainer.collate(prompts, range(len(prompts)))
        local = collector.local_prompts(engine, batches, trainer.dummy_prompts)
        answers: list[tuple[list[int], str]] = []
        if local is not None:
            assert collector.reference is not None
            with (
                collector.reference.on_device(trainer.accelerator.device) as policy,
                engine.autocast(),
                engine.sampling(policy) as model,
            ):
                # A sampler with weights of its own has those of the policy.
                backend = "auto" if collector.backend.has_own_weights else collector.backend
                size = trainer.args.rollout_per_device_batch_size
                samples = sample_responses(model, local, params, backend=backend, per_device_batch_size=size)
            answers = list(zip(*response_texts(trainer.processing_class, samples), strict=True))
        return self._in_order(answers, len(prompts))

    def _in_order(self, share: list[Any], count: int) -> list[Any]:
        """What every rank has for its own prompts, in the order of all; a rank's dummies come after its own."""
        parts = collectives.gather_list(share, self.trainer.accelerator)
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
