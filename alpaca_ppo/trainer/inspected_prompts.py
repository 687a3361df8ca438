"""Tables for the report's token inspector: the step's logged rollouts, and a few prompts followed through training.

Nothing here is trained on or enters a metric: a run learns the same with these tables and without them. Every rank
makes the same passes over the same few rows, so that sharded models can take part; the main process writes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from alpaca_ppo.distributed.random_states import kept_random_states
from alpaca_ppo.ppo import hook_checks, metrics
from alpaca_ppo.ppo.minibatches import row_tensors
from alpaca_ppo.ppo.rollouts import POLICY_ALONE, RolloutPasses
from alpaca_ppo.tracking import rollout_tables
from alpaca_ppo.types import Rollouts

if TYPE_CHECKING:
    from alpaca_ppo.trainer.rollout_trainer import RolloutTrainer

LOOKS = 10
"""Steps of a run at which prompts of the training data are answered, besides its start."""


def logged_rollouts(trainer: "RolloutTrainer", rollouts: Rollouts, step: int) -> list[dict[str, Any]]:
    """Returns the rows of the table of rollouts of `step` (from 1), after its update.

    In steps that log entropies they have the ratio of the updated policy to the old one, for which the policy makes a
    pass over these rows.
    """
    count = trainer.args.num_logged_rollouts
    first: Any = {name: value[:count] for name, value in rollouts.items()}  # type: ignore[index]
    if metrics.logs_entropies(step - 1) and step > trainer.args.critic_pretraining_steps:
        evaluated = trainer.collector.evaluate(
            trainer.updater.engine, row_tensors(first), POLICY_ALONE, temperature=trainer.args.temperature
        )
        first["ratio"] = torch.exp(evaluated["logprobs"] - first["logprobs"]) * first["response_mask"]
    names = trainer.collector.scorer.names
    rows = rollout_tables.rollout_rows(first, trainer.processing_class, source_names=names)
    return rollout_tables.with_columns(rows, trainer.train_prompts, trainer.args)


def add_tokens(trainer: "RolloutTrainer", rollouts: Rollouts, rows: Sequence[dict[str, Any]]) -> None:
    """Adds `tokens` to those of an evaluation's `rows` that answer its first `num_inspected_prompts` prompts.

    Values and entropies take a pass of the models over these rows.

    Args:
        trainer: of the run.
        rollouts: the global rollouts of the evaluation.
        rows: their rows, in the same order.
    """
    args = trainer.args
    followed = (rollouts["prompt_ids"] < args.num_inspected_prompts) & (rollouts["sample_ids"] == 0)
    chosen = followed.nonzero().squeeze(1)
    if not len(chosen):
        return
    few: Any = {name: value[chosen] for name, value in rollouts.items()}  # type: ignore[index]
    few |= _evaluated(trainer, few)
    for place, i in enumerate(chosen.tolist()):
        rows[i]["tokens"] = rollout_tables.token_entries(few, trainer.processing_class, place)


class TrainingPromptInspector(TrainerCallback):
    """Without an eval dataset and without environments: the policy's greedy answers to the first
    `num_inspected_prompts` training prompts, before training and at `LOOKS` steps of it, in inspected/step_*.jsonl.

    They are not scored: a reward function may count its calls, or cost money.

    Args:
        trainer: the trainer, once its parts are built.
    """

    def __init__(self, trainer: "RolloutTrainer") -> None:
        self.trainer = trainer
        count = min(trainer.args.num_inspected_prompts, len(trainer.train_prompts))
        unused = trainer.eval_prompts or trainer.environments is not None
        self.prompt_ids = [] if unused else list(range(count))

    def on_step_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Before the first step."""
        if self.prompt_ids and self.trainer.progress.at_start:
            self.answer(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """At the steps that divide the run into `LOOKS` parts."""
        total, step = self.trainer.schedule.num_steps, state.global_step
        if self.prompt_ids and step * LOOKS // total > (step - 1) * LOOKS // total:
            self.answer(step)

    def answer(self, step: int) -> None:
        """Writes the table of `step`. The global random generators are left as they were."""
        trainer = self.trainer
        batch = trainer.prompt_batch([trainer.train_prompts[i] for i in self.prompt_ids], self.prompt_ids)
        params = replace(trainer.sampling_params, do_sample=False, num_return_sequences=1)
        rollouts: Any = None
        # A signal leaves the inner block, and `poll` raises on every rank if one of them was stopped.
        with kept_random_states(), trainer.preemption.rollout(can_stop=trainer.progress.is_current):
            samples = hook_checks.complete_samples(trainer._generate(batch, params), batch, params)
            unscored = {"scores": torch.full((len(batch["rows"]),), torch.nan)}
            rollouts = samples | _evaluated(trainer, samples) | unscored
        trainer.poll()
        rows = rollout_tables.rollout_rows(rollouts, trainer.processing_class)
        rows = rollout_tables.with_columns(rows, trainer.train_prompts, trainer.args)
        trainer.run_log.log_table("inspected", rows, step)


def _evaluated(trainer: "RolloutTrainer", samples: Any) -> dict[str, torch.Tensor]:
    """Log-probs, entropies, KL and values of `samples` under the policy as it is now, its reference and the critic."""
    rows = row_tensors(samples) | {"rollout_logprobs": samples["rollout_logprobs"]}
    passes = RolloutPasses(with_critic=trainer.actor_critic.critic is not None, with_entropies=True)
    numbers: dict[str, torch.Tensor] = trainer.collector.evaluate(
        trainer.updater.engine, rows, passes, temperature=trainer.args.temperature
    )
    return numbers | {"kl": numbers["logprobs"] - numbers["ref_logprobs"]}
