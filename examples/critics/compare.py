"""The critics compared: `python -m examples.critics.compare` makes what is missing, and writes RESULTS.md.

Six tasks, of which the last has a real model; data and seeds are those of `examples.defaults.compare`.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from alpaca_ppo.config.parser import parse_args
from examples.defaults.compare import CompareArguments
from examples.defaults.records import Run, fill, outcome
from examples.defaults.rows import grpo
from examples.defaults.tasks import TASKS

RECORD = Path(__file__).with_name("results.jsonl")
DATA_SEED, SEEDS, EVALUATIONS = 0, (2, 3, 4, 5, 6), 5
GRPO = "GRPO"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "separate, 4 passes": {},
    "separate, 1 pass": {"critic_epochs": 1},
    "shared": {"critic_layout": "shared"},
    "cached": {"critic_layout": "cached", "critic_epochs": 8},
    "cached, small": {"critic_layout": "cached", "critic_epochs": 8, "critic_width": 64, "critic_depth": 2},
    GRPO: {},
}


def asked_of(run: Run) -> Run:
    """Returns the arguments of `examples.defaults.run` for `run`."""
    sizes = TASKS[run["task"]].sizes
    evaluations = 2 if run["task"] == "sentences" else EVALUATIONS
    evaluated = {"eval_steps": -(-sizes["total_episodes"] // sizes["rollout_batch_size"] // evaluations)}
    settings = {**evaluated, **SETTINGS[run["row"]], **(grpo(run["task"]) if run["row"] == GRPO else {})}
    return {"task": run["task"], "settings": settings, "data_seed": DATA_SEED, "seed": run["seed"]}


def main(argv: Any = None) -> None:
    """Makes the missing runs."""
    (arguments,) = parse_args([CompareArguments], argv)
    root, record = Path(arguments.root).resolve(), Path(arguments.record)
    for task in arguments.tasks:
        TASKS[task].prepare(root / task / f"data_{DATA_SEED}", DATA_SEED)
    asked = [
        {"row": row, "task": task, "seed": seed} for seed in SEEDS for task in arguments.tasks for row in SETTINGS
    ]
    fill(record, asked, lambda run: outcome("examples.defaults.run", root, asked_of(run)), jobs=arguments.jobs)


if __name__ == "__main__":
    main()
