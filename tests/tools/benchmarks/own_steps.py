"""The steps of this package's trainer, for the benchmark."""

import tempfile
from typing import Any

import accelerate
import transformers
from datasets import Dataset
from transformers import TrainerCallback

from alpaca_ppo import PPOConfig, PPOTrainer
from tests.tools.benchmarks import workloads
from tests.tools.benchmarks.worker import StepMeter, given_workload
from tests.tools.benchmarks.workloads import Workload

MANY_STEPS = 1000


def count_tokens(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The number of tokens of each response."""
    return [float(len(ids)) for ids in completion_ids]


def make_trainer(
    workload: Workload,
    output_dir: str,
    steps: int = MANY_STEPS,
    *,
    peft_config: Any = None,
    callbacks: Any = None,
    **settings: Any,
) -> PPOTrainer:
    """A trainer of `workload` with the defaults, but for the sizes and for what it would write; `settings` replace
    fields of its configuration.
    """
    words = workloads.tokenizer(workload)
    own: dict[str, Any] = {
        "output_dir": output_dir,
        "query_len": workload.prompt_len,
        "response_len": workload.response_len,
        "rollout_batch_size": workload.num_prompts,
        "rollout_per_device_batch_size": workload.num_prompts,
        "step_batch_size": workload.step_batch_size,
        "step_per_device_batch_size": workload.micro_batch_size,
        "ppo_epochs": workload.ppo_epochs,
        # Policy and critic step together, as in TRL and in the bare compute.
        "critic_epochs": None,
        "total_episodes": steps * workload.num_prompts,
        "save_steps": steps + 1,
        "num_logged_rollouts": 0,
        "num_inspected_prompts": 0,
        "report": False,
        "report_to": ["none"],
        "use_cpu": True,
    }
    args = PPOConfig(**{**own, **settings})
    has_backbone = args.uses_critic and args.critic_layout in ("auto", "separate")
    return PPOTrainer(
        model=workloads.policy(workload),
        value_model=workloads.classifier(workload, 1) if has_backbone else None,
        reward_funcs=workloads.classifier(workload, 2) if workload.has_reward_model else count_tokens,
        reward_processing_classes=words if workload.has_reward_model else None,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": text} for text in workloads.prompt_texts(workload)]),
        processing_class=words,
        peft_config=peft_config,
        callbacks=callbacks,
    )


class Turns(TrainerCallback):
    """Waits before each step, and reports it once it is logged."""

    def __init__(self, meter: StepMeter) -> None:
        self._meter = meter

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.begin()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name, value in logs.items():
            if name.startswith("time/") and name != "time/step":
                self._meter.add_seconds(name.removeprefix("time/"), value)
        self._meter.end(
            response_tokens=int(logs["tokens/sampled"]),
            recomputed=bool(logs.get("mismatch/recomputed", args.old_policy != "rollout")),
        )


def main() -> None:
    meter = StepMeter()
    with tempfile.TemporaryDirectory() as folder:
        workload = given_workload()
        trainer = make_trainer(workload, folder, callbacks=[Turns(meter)], **workload.settings)
        meter.train(trainer, transformers, accelerate)


if __name__ == "__main__":
    main()
