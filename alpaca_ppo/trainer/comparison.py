"""`Contest`: the policy's answers compared with those of an opponent, which stay the same for the whole run.

Judges, stored answers and win-rates are in `evaluation`; the trainer calls this from `evaluation.Evaluator`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from alpaca_ppo.config.modules import load_function
from alpaca_ppo.data import PromptDataset
from alpaca_ppo.distributed import collectives
from alpaca_ppo.evaluation.judges import Comparison, FunctionJudge, compare
from alpaca_ppo.evaluation.opponents import REFERENCE, stored_answers
from alpaca_ppo.evaluation.settings import EvaluationSettings
from alpaca_ppo.evaluation.summary import ResponseRecord
from alpaca_ppo.ppo.rollouts import sample_responses
from alpaca_ppo.rewards import RewardScorer
from alpaca_ppo.rewards.scoring import response_texts
from alpaca_ppo.trainer import setup
from alpaca_ppo.types import Rollouts

if TYPE_CHECKING:
    from alpaca_ppo.trainer.rollout_trainer import RolloutTrainer


class Contest:
    """Compares the policy of a trainer with its `eval_opponent`.

    Args:
        trainer: whose policy, reference and rewards are used.
        metric_scorer: the metric functions, one of which may be the judge.
        settings: names of the scores that may judge.

    Raises:
        ValueError: if the function that `eval_judge` names cannot be loaded.
    """

    def __init__(self, trainer: "RolloutTrainer", metric_scorer: RewardScorer, settings: EvaluationSettings) -> None:
        self.trainer, self.metric_scorer = trainer, metric_scorer
        self._score = settings.judged_by
        self._judge: FunctionJudge | None = None
        if self._score is None:
            judge = trainer.args.eval_judge
            self._judge = FunctionJudge(load_function(judge, what="eval_judge"), name=judge)
        self._answers: dict[str, list[tuple[list[int], str]]] = {}
        self._scores: dict[str, list[float]] = {}

    def judge(
        self, eval_set: str, prompts: PromptDataset, records: Sequence[ResponseRecord], rollouts: Rollouts
    ) -> None:
        """Sets the win, the opponent's answer and the difference in length of each of the `records`.

        Args:
            eval_set: its name; the opponent's answers are made or read once for each.
            prompts: of the set.
            records: of the policy's responses.
            rollouts: the responses, in the same order.
        """
        if eval_set not in self._answers:
            self._answers[eval_set] = self._opponent_answers(prompts)
        others = self._answers[eval_set]
        own = response_texts(self.trainer.processing_class, rollouts)[1]
        for record, text in zip(records, own, strict=True):
            record.opponent = others[record.prompt_id][1]
            record.length_difference = float(len(text) - len(record.opponent))
        if self._score is not None:
            if eval_set not in self._scores:
                self._scores[eval_set] = self._opponent_scores(prompts, others, self._score)
            for record in records:
                mine, theirs = record.values[self._score], self._scores[eval_set][record.prompt_id]
                record.win = None if math.isnan(mine + theirs) else compare(mine, theirs)
        elif records:
            self._ask(prompts, records, own)

    def _ask(self, prompts: PromptDataset, records: Sequence[ResponseRecord], own: Sequence[str]) -> None:
        """Asks the judge on the main process."""
        judge, trainer = self._judge, self.trainer
        assert judge is not None
        pairs = []
        for record, text in zip(records, own, strict=True):
            columns = dict(prompts[record.prompt_id]["row"])
            pairs.append(Comparison(columns.pop("prompt"), text, str(record.opponent), columns))
        wins = collectives.on_main_process(lambda: judge(pairs), trainer.accelerator)
        trainer.poll()
        for record, win in zip(records, wins, strict=True):
            record.win = win

    def _opponent_answers(self, prompts: PromptDataset) -> list[tuple[list[int], str]]:
        """The tokens and the text of each answer; the tokens that the policy's tokenizer makes of a stored one."""
        opponent = str(self.trainer.args.eval_opponent)
        if opponent == REFERENCE:
            return self._reference_answers(prompts)
        texts = stored_answers(opponent, [prompts[i]["row"] for i in range(len(prompts))])
        ids = self.trainer.processing_class(texts, add_special_tokens=False)["input_ids"]
        return list(zip(ids, texts, strict=True))

    def _reference_answers(self, prompts: PromptDataset) -> list[tuple[list[int], str]]:
        """One response of the reference to each prompt, with the random numbers of the policy's first."""
        trainer = self.trainer
        engine, collector = trainer.updater.engine, trainer.collector
        params = setup.evaluation_sampling_params(trainer.sampling_params, trainer.args)
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

    def _opponent_scores(
        self, prompts: PromptDataset, answers: Sequence[tuple[list[int], str]], name: str
    ) -> list[float]:
        """What the judging score gives to each of the opponent's answers; NaN where it fails or returns None."""
        trainer, own = self.trainer, collectives.rank_share(range(len(prompts)), self.trainer.accelerator)
        share = list(own)
        if trainer.updater.engine.synced_forwards:
            most = collectives.max_int_over_ranks(len(share), trainer.accelerator)
            share += [0] * (most - len(share))
        rows = [prompts[i]["row"] for i in share]
        from_rewards = name == "scores" or name.startswith("scores/")
        scorer = trainer.collector.scorer if from_rewards else self.metric_scorer
        ids, texts = [answers[i][0] for i in share], [answers[i][1] for i in share]
        result = scorer([row["prompt"] for row in rows], texts, ids, rows)
        failed = set(result.failures)
        scorer.pop_failures()
        # What functions log about the opponent is not about the next step.
        scorer.logged.pop()
        totals = result.rewards if result.rewards.dim() == 1 else result.rewards.sum(dim=1)
        found = totals if name == "scores" else result.by_source[name.removeprefix("scores/")]
        scores = [math.nan if i in failed else value for i, value in enumerate(found.tolist())]
        return self._in_order(scores, len(prompts))

    def _in_order(self, share: list[Any], count: int) -> list[Any]:
        """What every rank has for its own prompts, in the order of all; a rank's dummies come after its own."""
        parts = collectives.gather_list(share, self.trainer.accelerator)
        return [parts[i % len(parts)][i // len(parts)] for i in range(count)]
