"""The steps of TRL's GRPOTrainer, for the benchmark. Runs in TRL's own virtual environment, without this package."""

import tempfile
from typing import Any

import transformers
import trl
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tests.tools.benchmarks import workloads
from tests.tools.benchmarks.worker import StepMeter, given_workload
from tests.tools.benchmarks.workloads import Workload


class Reward:
    """The number of tokens of each response, as in this package's runs, which are counted on the way."""

    __name__ = "tokens"

    def __init__(self) -> None:
        self.tokens = 0
        """Of the last step."""

    def __call__(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self.tokens = sum(len(ids) for ids in completion_ids)
        return [float(len(ids)) for ids in completion_ids]


class Turns(transformers.TrainerCallback):
    """Waits before each step, and reports it afterwards."""

    def __init__(self, meter: StepMeter, reward: Reward) -> None:
        self._meter, self._reward = meter, reward

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # With one optimizer step to a rollout, its old log-probs are those of the update's own pass.
        self._meter.end(response_tokens=self._reward.tokens, recomputed=False)
        self._meter.begin()


def make_trainer(workload: Workload, output_dir: str, meter: StepMeter) -> GRPOTrainer:
    """TRL's trainer of `workload`: a rollout is one optimizer step, in float32, without gradient checkpointing, and
    nothing is saved or sent anywhere. The rest is its default, so there is no reference.
    """
    answers, reward = workload.settings["num_return_sequences"], Reward()
    return GRPOTrainer(
        model=workloads.policy(workload),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=output_dir,
            num_generations=answers,
            per_device_train_batch_size=answers * workload.num_prompts,
            max_completion_length=workload.response_len,
            learning_rate=1e-6,
            max_steps=1000,
            save_strategy="no",
            report_to="none",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": text} for text in workloads.prompt_texts(workload)]),
        processing_class=workloads.tokenizer(workload),
        callbacks=[Turns(meter, reward)],
    )


def main() -> None:
    meter = StepMeter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(given_workload(), folder, meter)
        meter.train(trainer, transformers, trl)


if __name__ == "__main__":
    main()
