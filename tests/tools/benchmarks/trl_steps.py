"""The steps of TRL's PPOTrainer, for the benchmark. Runs in TRL's own virtual environment, without this package.

TRL's loop is one function. Its stages are told apart by the functions of its module that it calls: `batch_generation`
(rollout), then `forward` and `get_reward` (reference, critic, reward model), and what remains is the update.
"""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from tests.tools.benchmarks import workloads
from tests.tools.benchmarks.worker import StepMeter, given_workload
from tests.tools.benchmarks.workloads import Workload

MANY_STEPS = 1000


def make_trainer(workload: Workload, output_dir: str, meter: StepMeter) -> PPOTrainer:
    """TRL's trainer of `workload`: float32, no gradient checkpointing, nothing saved, evaluated or sent anywhere.

    TRL steps the optimizer where its gradient accumulation ends, not where a mini-batch does: once an epoch.
    """
    prompts = Dataset.from_list([{"input_ids": ids} for ids in workloads.prompt_ids(workload)])
    args = PPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=workload.micro_batch_size,
        gradient_accumulation_steps=workload.num_prompts // workload.micro_batch_size,
        num_mini_batches=workload.num_prompts // workload.step_batch_size,
        num_ppo_epochs=workload.ppo_epochs,
        local_rollout_forward_batch_size=workload.num_prompts,
        response_length=workload.response_len,
        stop_token="eos",
        temperature=1.0,
        learning_rate=1e-6,
        total_episodes=MANY_STEPS * workload.num_prompts,
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        disable_tqdm=True,
    )
    return PPOTrainer(
        args=args,
        processing_class=workloads.tokenizer(workload),
        model=workloads.policy(workload),
        ref_model=None,
        reward_model=workloads.classifier(workload, 2),
        value_model=workloads.classifier(workload, 1),
        train_dataset=prompts,
        # TRL's constructor reads its length.
        eval_dataset=prompts,
        callbacks=[Turns(meter)],
    )


class Turns(TrainerCallback):
    """Waits before each step, and reports it afterwards."""

    def __init__(self, meter: StepMeter) -> None:
        self._meter = meter
        self.rollout_ended = 0.0
        """Seconds from the step's begin to the end of its last pass without gradients."""
        self.tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.add_seconds("update", self._meter.wall - self.rollout_ended)
        # The old log-probs are made of the logits that sampling has kept.
        self._meter.end(response_tokens=self.tokens, recomputed=False)
        self._meter.begin()


def time_stages(trainer: PPOTrainer, turns: Turns, meter: StepMeter) -> None:
    """Wraps the functions of TRL's module that the stages before the update call."""

    def timed(function: Callable[..., Any], stage: Callable[[Any], str | None]) -> Callable[..., Any]:
        def wrapper(model: Any, *args: Any, **kwargs: Any) -> Any:
            name, start = stage(model), time.perf_counter()
            result = function(model, *args, **kwargs)
            if name is not None:
                meter.add_seconds(name, time.perf_counter() - start)
                turns.rollout_ended = meter.wall
            return result

        return wrapper

    def sample(model: Any, queries: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, logits = generate(model, queries, *args, **kwargs)
        # TRL scores and trains the eos, but nothing after it.
        turns.tokens = int((ids[:, queries.size(1) :] != workloads.PAD).sum())
        return ids, logits

    generate = ppo_trainer.batch_generation
    ppo_trainer.batch_generation = timed(sample, lambda model: "rollout")
    ppo_trainer.get_reward = timed(
        ppo_trainer.get_reward, lambda model: "score" if model is trainer.reward_model else "logprobs"
    )
    ppo_trainer.forward = timed(ppo_trainer.forward, lambda model: "logprobs" if model is trainer.ref_model else None)


def main() -> None:
    meter = StepMeter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(given_workload(), folder, meter)
        turns = next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Turns))
        time_stages(trainer, turns, meter)
        meter.train(trainer, transformers, trl)


if __name__ == "__main__":
    main()
