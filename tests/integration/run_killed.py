"""A tiny run in which something goes wrong: the process is killed, signalled or raises at a moment that is asked for.

Usage: run_killed.py OUTPUT_DIR [field=value ...] [trouble=WHAT@WHERE:NUMBER[,...]] [rank=RANK]. It resumes by itself
where OUTPUT_DIR holds a checkpoint. WHAT is raise, exit, SIGKILL, SIGTERM or SIGINT; WHERE is `reward`, `update` (a
micro-batch) or `disk` (an fsync, a rename or a removal under OUTPUT_DIR); NUMBER counts those of this process, from 1.
"""

import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))

from transformers import TrainerCallback  # noqa: E402

from alpaca_ppo import PPOTrainer  # noqa: E402
from alpaca_ppo.checkpoint.directory import newest_checkpoint
from tests.tiny_runs import count_even, prompts, tiny_trainer  # noqa: E402

RUN: dict[str, Any] = {"total_episodes": 40, "ppo_epochs": 2, "save_steps": 1, "save_total_limit": 2, "eval_steps": 2}
SAVED = "saved.txt"
"""Names of the checkpoints that the run reported as saved, one a line."""
PHASES = ("rollout", "step_with_rollouts", "record_step_stats", "evaluate", "save_checkpoint", "save_model")
DISK = ("fsync", "rename", "replace", "unlink", "rmdir")


class Report(TrainerCallback):
    """Writes down what `on_save` reports, where a killed process cannot take it back."""

    def on_save(self, args, state, control, **context):
        if state.is_world_process_zero:
            with open(Path(args.output_dir) / SAVED, "a") as file:
                file.write(f"checkpoint-{state.global_step}\n")


class Held:
    """`count_even`, some seconds later: an attribute of an object, which a resumed run may change."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> Any:
        time.sleep(self.seconds)
        return count_even(prompts, completions, completion_ids)


def befall(what: str) -> None:
    """Does to this process what the name says."""
    if what == "raise":
        raise RuntimeError("the judge has gone home")
    if what == "exit":
        os._exit(1)
    os.kill(os.getpid(), signal.Signals[what])


def at_the(number: int, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, before whose `number`-th call `what` befalls this process."""
    count = itertools.count(1)

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(count) == number:
            befall(what)
        return function(*args, **kwargs)

    return counted


def _after(strike: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    def struck(*args: Any, **kwargs: Any) -> Any:
        strike()
        return function(*args, **kwargs)

    return struck


def prepare(trainer: PPOTrainer, what: str, where: str, number: str) -> None:
    """Lets `what` befall this process at the `number`-th reward call, micro-batch or access to the disk."""
    if where == "reward":
        (source,) = trainer.collector.scorer.sources
        source.function = at_the(int(number), what, source.function)
    elif where == "update":
        trainer.updater.backward = at_the(int(number), what, trainer.updater.backward)
    else:
        # One count for all of them.
        strike = at_the(int(number), what, lambda: None)
        for name in DISK:
            setattr(os, name, _after(strike, getattr(os, name)))


def tell_phase(output_dir: str, name: str) -> None:
    """Notes what the run is about to do, and which process does it, for whoever means to kill it."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    file = os.open(Path(output_dir) / f"phase{os.environ.get('RANK', 0)}.txt", os.O_WRONLY | os.O_CREAT)
    # One write of one length: whoever reads finds the old text or the new one.
    os.pwrite(file, f"{os.getpid()} {name}".ljust(60).encode(), 0)
    os.close(file)


def run(output_dir: str, *settings: str) -> PPOTrainer:
    """Trains, resuming where there is a checkpoint; `hold=SECONDS` are spent in every reward call."""
    overrides = {name: yaml.safe_load(value) for name, _, value in (setting.partition("=") for setting in settings)}
    rank, troubles, unlucky = int(os.environ.get("RANK", 0)), overrides.pop("trouble", ""), overrides.pop("rank", 0)
    reward = Held(float(overrides.pop("hold", 0.0)))
    arguments = {"reward_funcs": reward, "eval_dataset": prompts(3), "callbacks": [Report]}
    # What was killed before its first checkpoint leaves records that nothing can continue.
    resume = newest_checkpoint(output_dir) is not None
    trainer = tiny_trainer(
        output_dir, trainer_arguments=arguments, overwrite_output_dir=not resume, **{**RUN, **overrides}
    )
    if rank == unlucky:
        for trouble in filter(None, troubles.split(",")):
            prepare(trainer, *re.fullmatch(r"(\w+)@(\w+):(\d+)", trouble).groups())
    for name in PHASES:
        setattr(trainer, name, _after(partial(tell_phase, output_dir, name), getattr(trainer, name)))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(*sys.argv[1:]).accelerator.end_training()
