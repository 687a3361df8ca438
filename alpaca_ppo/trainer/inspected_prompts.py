"""Tables for the report's token inspector: logged rollouts, and a few prompts that are answered again and again.

They change nothing that is learned or measured. Every rank makes the same forward passes over these few rows, as
sharded models need; the main process writes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from alpaca_ppo.ppo import metrics
from alpaca_ppo.ppo.device_rows import row_tensors
from alpaca_ppo.ppo.rollouts import POLICY_ALONE, RolloutCollector, RolloutOptions
from alpaca_ppo.ppo.row_masks import select_rows
from alpaca_ppo.tracking import rollout_tables
from alpaca_ppo.types import Rollouts

NUM_INSPECTIONS = 10
"""How often training prompts are answered during a run, besides its start."""


def logged_rollouts(
    collector: RolloutCollector, processing_class: Any, rollouts: Rollouts, step: int
) -> list[dict[str, Any]]:
    """Returns the rows of the table of rollouts of `step` (from 1), after its update.

    The rows have the ratio of new to old policy, by another forward pass, if the step trains it and logs entropies.
    """
    args = collector.args
    logged = select_rows(rollouts, slice(args.num_logged_rollouts))
    if metrics.logs_entropies(step - 1) and step > args.critic_pretraining_steps:
        updated = collector.forward(row_tensors(logged), POLICY_ALONE, temperature=args.temperature)
        logged["ratio"] = torch.exp(updated["logprobs"] - logged["logprobs"]) * logged["response_mask"]
    return rollout_tables.rollout_rows(logged, processing_class, source_names=collector.scorer.names)


def add_tokens(
    collector: RolloutCollector, processing_class: Any, rollouts: Rollouts, rows: Sequence[dict[str, Any]]
) -> None:
    """Adds `tokens` to the table's `rows` of the first response to each of the first `num_inspected_prompts` prompts.

    Values and entropies take a forward pass over these rows. `rollouts` are an evaluation's responses with a reward, of
    all ranks: one for each row of the table.
    """
    inspected = (rollouts["prompt_ids"] < collector.args.num_inspected_prompts) & (rollouts["sample_ids"] == 0)
    indices = inspected.nonzero().squeeze(1)
    if not len(indices):
        return
    chosen: Any = select_rows(rollouts, indices)
    chosen |= token_statistics(collector, chosen)
    for position, i in enumerate(indices.tolist()):
        rows[i]["tokens"] = rollout_tables.token_entries(chosen, processing_class, position)


def token_statistics(collector: RolloutCollector, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Log-probs, entropies, KL and values of `samples` under the current policy, the reference and the critic."""
    rows = row_tensors(samples) | {"rollout_logprobs": samples["rollout_logprobs"]}
    options = RolloutOptions(with_critic=collector.engine.actor_critic.critic is not None, with_entropies=True)
    statistics = collector.forward(rows, options, temperature=collector.args.temperature)
    return statistics | {"kl": statistics["logprobs"] - statistics["ref_logprobs"]}


class TrainingPromptInspector(TrainerCallback):
    """Has a few training prompts answered before training and in `NUM_INSPECTIONS` steps, for inspected/step_*.jsonl.

    Args:
        answer: answers them and writes the table of a step.
    """

    def __init__(self, answer: Callable[[int], None]) -> None:
        self._answer = answer

    def on_step_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        if state.global_step == 0:
            self._answer(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        total, step = state.max_steps, state.global_step
        if step * NUM_INSPECTIONS // total > (step - 1) * NUM_INSPECTIONS // total:
            self._answer(step)
