"""Tables for the report's token inspector: the step's logged rollouts, and a few prompts followed through training.

Nothing here is trained on or enters a metric: a run learns the same with these tables and without them. Every rank
makes the same passes over the same few rows, so that sharded models can take part; the main process writes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from alpaca_ppo import hook_checks
from alpaca_ppo.generation import SamplingParams
from alpaca_ppo.ppo import metrics
from alpaca_ppo.ppo.device_rows import row_tensors
from alpaca_ppo.ppo.rollouts import POLICY_ALONE, RolloutCollector, RolloutOptions
from alpaca_ppo.ppo.row_masks import with_reward
from alpaca_ppo.tracking import rollout_tables
from alpaca_ppo.types import PromptBatch, Rollouts

NUM_INSPECTIONS = 10
"""Steps of a run at which prompts of the training data are answered, besides its start."""


def logged_rollouts(
    collector: RolloutCollector, processing_class: Any, rollouts: Rollouts, step: int
) -> list[dict[str, Any]]:
    """Returns the rows of the table of rollouts of `step` (from 1), after its update.

    In steps that log entropies they have the ratio of the updated policy to the old one, for which the policy makes a
    pass over these rows.
    """
    args = collector.args
    first: Any = {name: value[: args.num_logged_rollouts] for name, value in rollouts.items()}  # type: ignore[index]
    if metrics.logs_entropies(step - 1) and step > args.critic_pretraining_steps:
        now = collector.forward(row_tensors(first), POLICY_ALONE, temperature=args.temperature)
        first["ratio"] = torch.exp(now["logprobs"] - first["logprobs"]) * first["response_mask"]
    return rollout_tables.rollout_rows(first, processing_class, source_names=collector.scorer.names)


def add_tokens(
    collector: RolloutCollector, processing_class: Any, rollouts: Rollouts, rows: Sequence[dict[str, Any]]
) -> None:
    """Adds `tokens` to those of an evaluation's `rows` that answer its first `num_inspected_prompts` prompts.

    Values and entropies take a pass of the models over these rows.

    Args:
        collector: of the run.
        processing_class: the policy's tokenizer.
        rollouts: the global rollouts of the evaluation.
        rows: of those that have a reward, in the same order.
    """
    rollouts = with_reward(rollouts)
    followed = (rollouts["prompt_ids"] < collector.args.num_inspected_prompts) & (rollouts["sample_ids"] == 0)
    chosen = followed.nonzero().squeeze(1)
    if not len(chosen):
        return
    few: Any = {name: value[chosen] for name, value in rollouts.items()}  # type: ignore[index]
    few |= token_numbers(collector, few)
    for place, i in enumerate(chosen.tolist()):
        rows[i]["tokens"] = rollout_tables.token_entries(few, processing_class, place)


def token_numbers(collector: RolloutCollector, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Log-probs, entropies, KL and values of `samples` under the policy as it is now, its reference and the critic."""
    rows = row_tensors(samples) | {"rollout_logprobs": samples["rollout_logprobs"]}
    options = RolloutOptions(with_critic=collector.engine.actor_critic.critic is not None, with_entropies=True)
    numbers = collector.forward(rows, options, temperature=collector.args.temperature)
    return numbers | {"kl": numbers["logprobs"] - numbers["ref_logprobs"]}


def greedy_answers(
    collector: RolloutCollector,
    prompts: PromptBatch,
    sampling_params: SamplingParams,
    generate: Callable[[PromptBatch, SamplingParams], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """The policy's most likely answer to each of `prompts`, by the hook `generate`, with the numbers of its tokens; it
    has no score (NaN).
    """
    params = replace(sampling_params, do_sample=False, num_return_sequences=1)
    samples = hook_checks.complete_samples(
        generate(prompts, params), prompts, num_return_sequences=1, max_new_tokens=params.max_new_tokens
    )
    unscored = torch.full((len(prompts["rows"]),), torch.nan)
    return {**samples, **token_numbers(collector, samples), "scores": unscored}


class TrainingPromptInspector(TrainerCallback):
    """Without an eval dataset and without environments: the policy's greedy answers to a few training prompts, before
    training and at `NUM_INSPECTIONS` steps of it, in inspected/step_*.jsonl.

    Args:
        answer: writes the table of a step.
    """

    def __init__(self, answer: Callable[[int], None]) -> None:
        self._answer = answer

    def on_step_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Before the first step."""
        if state.global_step == 0:
            self._answer(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """At the steps that divide the run into `NUM_INSPECTIONS` parts."""
        total, step = state.max_steps, state.global_step
        if step * NUM_INSPECTIONS // total > (step - 1) * NUM_INSPECTIONS // total:
            self._answer(step)
