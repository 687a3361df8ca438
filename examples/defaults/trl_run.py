"""One run of a task with TRL's PPO or GRPO and its defaults: PPO of the tasks without an environment, GRPO of those
with a reward function.

`python -m examples.defaults.trl_run ROOT '{"task": "chain", "data_seed": 0, "seed": 1}'`: the last line on the screen
is what came of it, as JSON. TRL gets the model, prompts, rewards, number of responses, batches, lengths and learning
rate of this package's runs, and its policies are measured by this package's evaluation. Nothing else is set: see
`trl_settings` and `trl_grpo_settings`.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alpaca_ppo.cli.commands import main as alpaca_ppo
from examples.defaults.rows import grpo
from examples.defaults.run import MEASURING
from examples.defaults.tasks import TASKS, Options, Task
from examples.long_horizon.pipeline import flags_of
from examples.mini_farm.against_trl import launch_trl, trl_optimizer_steps, trl_sizes
from examples.trl_virtualenv import FOLDER, GRPO_FOLDER, GRPO_VERSION, VERSION, trl_python

POINTS = 5
"""How often a policy is measured on its way, the last time at the end."""


def trl_settings(task: Task, *, seed: int) -> dict[str, Any]:
    """Returns the arguments of TRL's `PPOConfig`: sizes, and the task's learning rate, schedule and temperature.

    As PPO without these would not be that of the task, float32 is set too, and that a response ends at its eos.

    Raises:
        ValueError: for a task with an environment.
    """
    if task.plays:
        raise ValueError("TRL's PPO has no environments; choose one of the other tasks")
    sizes = task.sizes
    return {
        **trl_sizes(
            rollout=sizes["rollout_batch_size"], step=sizes["step_batch_size"], response_len=sizes["response_len"]
        ),
        "total_episodes": sizes["total_episodes"],
        "temperature": 1.0,
        **_of_task(task, seed),
    }


def trl_grpo_settings(name: str, *, seed: int) -> dict[str, Any]:
    """Returns the arguments of TRL's `GRPOConfig` for the task `name`: sizes, the task's learning rate, schedule and
    temperature, and as many answers to a prompt as this package's GRPO. A rollout is one optimizer step, as in GRPO's
    paper.

    Raises:
        ValueError: for a task whose reward is not a function.
    """
    if TASKS[name].plays or name in ("mini_farm", "rlhf"):
        raise ValueError(f"{name} has no reward function for TRL's GRPO; choose one of the other tasks")
    task = TASKS[name]
    sizes = task.sizes
    return {
        "num_generations": grpo(name)["num_return_sequences"],
        "per_device_train_batch_size": sizes["rollout_batch_size"],
        "max_completion_length": sizes["response_len"],
        "max_steps": sizes["total_episodes"] // sizes["rollout_batch_size"],
        # Its default costs time, and saves memory that is there.
        "gradient_checkpointing": False,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        **_of_task(task, seed),
    }


def _of_task(task: Task, seed: int) -> dict[str, Any]:
    given = {name: task.sizes[name] for name in ("temperature", "lr_scheduler_type") if name in task.sizes}
    return {"learning_rate": task.options({})["learning_rate"], **given, "seed": seed, "use_cpu": True}


def trl_inputs(given: Options, query_len: int) -> dict[str, Any]:
    """Returns the files that TRL trains with, and the shape of their prompts.

    The critic starts from the reward model where there is one, as TRL's examples do. Elsewhere it starts from the
    policy, with a head of zeros.

    Args:
        given: the options of this package that name models and data.
        query_len: most tokens of a prompt; longer prompts are dropped, as this package does.
    """
    policy = str(given["model_name_or_path"])
    inputs = {"policy": policy, "value_model": policy, "prompts": str(given["dataset_name"]), "query_len": query_len}
    inputs["prompt_template"] = given.get("prompt_template", "{prompt}")
    if "reward_model_name_or_path" in given:
        reward_model = str(given["reward_model_name_or_path"])
        return {**inputs, "reward_model": reward_model, "value_model": reward_model}
    return {**inputs, "reward_function": given["reward_funcs"]}


def measure(policy: str, folder: Path, options: Options) -> Mapping[str, float]:
    """Returns the metrics of an evaluation of `policy`, by the command whose numbers are those of a run."""
    if status := alpaca_ppo(["evaluate", *flags_of({**options, "model": policy, "results_dir": folder})]):
        raise SystemExit(status)
    metrics: Mapping[str, float] = json.loads((folder / "results.json").read_text(encoding="utf-8"))["metrics"]
    return metrics


def main(root: Path, *, task: str, data_seed: int, seed: int, program: str = "ppo") -> dict[str, Any]:
    """Trains with TRL's `program`, ppo or grpo, and returns what a run of this package does, and the curve.

    The processor seconds are those of TRL's training alone, without loading, saving and evaluations. A point of the
    curve has the number of responses until then, the processor seconds, the task's number and the KL.
    """
    chosen, is_ppo = TASKS[task], program == "ppo"
    settings = trl_settings(chosen, seed=seed) if is_ppo else trl_grpo_settings(task, seed=seed)
    environment = (FOLDER, VERSION) if is_ppo else (GRPO_FOLDER, GRPO_VERSION)
    python = trl_python(*environment)
    if python is None:
        raise SystemExit(1)
    given = chosen.prepare(root / task / f"data_{data_seed}", data_seed)
    with tempfile.TemporaryDirectory(dir=root) as name:
        output = Path(name)
        inputs = trl_inputs(given, chosen.sizes["query_len"])
        run = {**inputs, "settings": settings, "output_dir": name, "points": POINTS}
        launch_trl(python, f"examples.defaults.trl_{program}", output, run)
        made = json.loads((output / "points.json").read_text(encoding="utf-8"))
        answers = made["points"][-1]["responses"]
        if is_ppo:
            steps = trl_optimizer_steps({**settings, "num_ppo_epochs": made["num_ppo_epochs"]})
        else:
            steps = settings["max_steps"]
        if (made["optimizer_steps"], answers) != (steps, chosen.sizes["total_episodes"]):
            found = f"{made['optimizer_steps']} optimizer steps on {answers} answers"
            raise RuntimeError(f"TRL made {found} instead of {steps} on {chosen.sizes['total_episodes']}")
        points = [{"policy": inputs["policy"], "responses": 0, "seconds": 0.0}, *made["points"]]
        options = {**MEASURING, **given, **chosen.options({}), "seed": seed, "output_dir": output / "unused"}
        measured = [measure(point["policy"], output / f"results_{n}", options) for n, point in enumerate(points)]
    scores = [round(chosen.in_points(metrics[chosen.metric]), 3) for metrics in measured]
    kl = [round(metrics["eval/kl_sum_seq"], 2) for metrics in measured]
    seconds = [round(point["seconds"], 1) for point in points]
    return {
        "before": scores[0],
        "after": scores[-1],
        "kl": kl[-1],
        "processor_seconds": seconds[-1],
        "curve": [[point["responses"], *numbers] for point, *numbers in zip(points, seconds, scores, kl, strict=True)],
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]).resolve(), **json.loads(sys.argv[2]))))
