"""A tiny trainer for the tests: a random model, forty prompts of uneven length, a reward that counts even ids."""

import gc
import itertools
import json
import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, TrainerCallback

from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.config.fields import options_of
from alpaca_ppo.estimate_memory.fake_models import LiveBytes
from alpaca_ppo.ppo.device_rows import row_tensors
from alpaca_ppo.ppo.metrics import StepStats
from alpaca_ppo.ppo.update_plan import UpdateStep
from alpaca_ppo.ppo.updates import Applied
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer


def count_even(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
) -> list[float]:
    """The number of even token ids in each response: a random model gets some of them right."""
    return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]


def prompts(count: int = 40) -> Dataset:
    """Prompts of one to four tokens."""
    return Dataset.from_list(
        [{"prompt": " ".join(f"w{10 + (7 * i + j) % 50}" for j in range(1 + i % 4))} for i in range(count)]
    )


def acting(settings: dict[str, Any]) -> dict[str, Any]:
    """Those of `settings` that can act beside the others: for tables of settings that are combined with each other."""
    args, options = PPOConfig(), options_of(PPOConfig)
    vars(args).update(settings)
    return {k: v for k, v in settings.items() if all(need.holds(args, {}) for need in options[k].needs)}


def tiny_config(output_dir: Path | str, **overrides: Any) -> PPOConfig:
    """Ten prompts a step, in one epoch of step batches of 4, 4 and 2 rows, in micro-batches of at most 3."""
    settings: dict[str, Any] = {
        "output_dir": str(output_dir),
        "query_len": 4,
        "response_len": 5,
        "rollout_batch_size": 10,
        "rollout_per_device_batch_size": 4,
        "step_batch_size": 4,
        "step_per_device_batch_size": 3,
        "ppo_epochs": 1,
        # Policy and critic step together, or a step would have twelve optimizer steps of the critic alone.
        "critic_epochs": None,
        "total_episodes": 20,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "kl_coef": 0.05,
        "kl_controller": "fixed",
        "report_to": ["none"],
        "save_steps": 0,
        "save_total_limit": None,
        "use_cpu": True,
        "logprob_chunk_size": 8,
        # tests/trainer/test_inspected_prompts.py and tests/report have them.
        "num_inspected_prompts": 0,
        "report": False,
    }
    return PPOConfig(**{**settings, **overrides})


def tiny_trainer(
    output_dir: Path | str,
    *,
    model: PreTrainedModel | None = None,
    trainer_class: type[PPOTrainer] = PPOTrainer,
    dtype: torch.dtype = torch.float32,
    trainer_arguments: dict[str, Any] | None = None,
    **overrides: Any,
) -> PPOTrainer:
    """A trainer of a random Llama on `prompts()`; `overrides` replace fields of `tiny_config`."""
    arguments: dict[str, Any] = {
        "model": model or tiny_causal_lm("llama", dtype=dtype),
        "reward_funcs": count_even,
        "args": tiny_config(output_dir, **overrides),
        "train_dataset": prompts(),
        "processing_class": tiny_tokenizer(),
    }
    return trainer_class(**{**arguments, **(trainer_arguments or {})})


def weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    """A copy of every parameter of policy and critic."""
    return {name: p.detach().clone() for name, p in trainer.actor_critic.named_parameters()}


def metric_lines(output_dir: Path | str, *, timings: bool = False) -> list[dict[str, Any]]:
    """metrics.jsonl, without what the clock and the memory decide unless `timings`."""
    lines = [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]
    measured = ("time/", "memory/", "tokens/per_second", "tokens/sampled_per_second")
    return [{k: v for k, v in line.items() if timings or not k.startswith(measured)} for line in lines]


def poisoned(*updates: tuple[int, int]) -> type[PPOTrainer]:
    """A trainer class that trains on a NaN in (step, update) of `updates`, both from 0: an advantage of the update's
    first row, in one micro-batch of one rank.
    """

    class Poisoned(PPOTrainer):
        def step_with_rollouts(self, rollouts: Any) -> dict[str, float]:
            take, advantages, count = self.updater.micro_batches, rollouts["advantages"], 0

            def micro_batches(rollouts: Any, update: UpdateStep) -> Any:
                nonlocal count
                rollouts["advantages"] = advantages.clone()
                if (self.state.global_step, count) in updates:
                    rollouts["advantages"][update.rows[0]] = torch.nan
                count += 1
                return take(rollouts, update)

            self.updater.micro_batches = micro_batches  # type: ignore[method-assign]
            try:
                return super().step_with_rollouts(rollouts)
            finally:
                self.updater.micro_batches = take  # type: ignore[method-assign]
                rollouts["advantages"] = advantages

    return Poisoned


def with_advantages(trainer: PPOTrainer, prompt_batches: Any) -> Any:
    """The rollouts on which `step` would make its updates."""

    class Reached(Exception):
        pass

    def step_with_rollouts(rollouts: Any) -> Any:
        raise Reached(rollouts)

    trainer.step_with_rollouts = step_with_rollouts  # type: ignore[method-assign]
    try:
        PPOTrainer.step(trainer, prompt_batches)
    except Reached as reached:
        return reached.args[0]
    finally:
        del trainer.step_with_rollouts


def one_update(
    trainer: PPOTrainer, rollouts: Any, rows: Sequence[int] | torch.Tensor, *, part: Any = "both", check: Any = None
) -> tuple[dict[str, float], Applied]:
    """One optimizer step on some rows of the rollouts: its statistics, and what became of it."""
    step, stats = trainer.state.global_step, StepStats()
    update = UpdateStep(part, torch.as_tensor(rows), step, (trainer.args.seed, step, 0, 0))
    for batch in trainer.updater.micro_batches(rollouts, update):
        stats.add(trainer.updater.backward(batch, trainer.compute_policy_loss, trainer.compute_value_loss))
    applied = trainer.updater.apply(update, stats, check or (lambda measured: None))
    return stats.reduce(trainer.accelerator, with_critic=trainer.actor_critic.critic is not None), applied


def loss_of(trainer: PPOTrainer, batch: Any) -> torch.Tensor:
    """The loss of policy and critic on `batch`, from one pass."""
    sizes: dict[str, Any] = {"temperature": trainer.args.temperature, "chunk_size": trainer.args.logprob_chunk_size}
    outputs = trainer.model(*row_tensors(batch).values(), value_taus=batch.get("value_taus"), **sizes)
    loss, _ = trainer.compute_policy_loss(batch, outputs)
    return loss if trainer.actor_critic.critic is None else loss + trainer.compute_value_loss(batch, outputs)[0]


def before_update(trainer: PPOTrainer, number: int, act: Callable[[], Any]) -> None:
    """Calls `act` before the run's optimizer step `number` (from 1) is applied."""
    apply, count = trainer.updater.apply, itertools.count(1)

    def applying(*arguments: Any, **how: Any) -> Applied:
        if next(count) == number:
            act()
        return apply(*arguments, **how)

    trainer.updater.apply = applying  # type: ignore[method-assign]


class Steep(PPOTrainer):
    """A trainer whose loss is finite, and the policy's gradient of it is not: sqrt(0) is 0, its derivative infinite."""

    def compute_policy_loss(self, batch: Any, outputs: Any) -> Any:
        loss, stats = super().compute_policy_loss(batch, outputs)
        return loss + (outputs.logprobs - outputs.logprobs.detach()).sum().abs().sqrt(), stats


class FillDisk(TrainerCallback):
    """At the end of `step`, fills the disk of the output folder until `left` bytes are free."""

    def __init__(self, step: int, left: int) -> None:
        self.step, self.left = step, left

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and state.is_world_process_zero:
            filler = Path(args.output_dir) / "filler"
            filler.write_bytes(b"x" * max(0, shutil.disk_usage(args.output_dir).free - self.left))


class LargestFile(TrainerCallback):
    """From the end of `step` on, this process can write no file beyond `size` bytes: a disk that is full, anywhere."""

    def __init__(self, step: int, size: int) -> None:
        self.step, self.size = step, size

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def track_all(live: LiveBytes) -> None:
    """Counts every tensor known to Python's garbage collector; call it before the work to be measured."""
    gc.collect()
    # Not isinstance, which would import modules that libraries load lazily.
    live.track([thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)])
