"""Makes the runs of `settings` with the package of one source tree: each in processes of its own, one after the other.

Usage: python -m same_numbers.runs TREE [NAME ...], in the folder that gets the outputs. Everything is imported once,
and each run is forked from there. This process is the launcher of runs with two processes: it sets what torchrun sets.
"""

import fcntl
import importlib
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy
import torch

import alpaca_ppo
from alpaca_ppo import PPOConfig, PPOTrainer

from . import trainers
from .inputs import adapted_lm, causal_lm, lora_config, prompts, reward_sources, tokenizer, write_inputs
from .settings import COMMON, LIKE_EARLIER, RENAMED_FIELDS, RUNS, Run

FAILED = "failed.txt"
"""File in the folder of a run that did not end well, with the end of what it printed."""
_SIGTERM_STATUS = 143
_SECONDS = 300
"""After which a run is given up."""
_SHOWN = 40


def check_tree(tree: Path) -> None:
    """Checks that the package comes from `tree`, whatever else is installed.

    Raises:
        RuntimeError: where it, or a module of it, was imported from another place.
    """
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.split(".")[0] == alpaca_ppo.__name__ and file and not Path(file).resolve().is_relative_to(tree):
            raise RuntimeError(f"{name} was imported from {file}, which is not in {tree}; PYTHONPATH must begin there")


def config_of(run: Run, output_dir: Path, inputs: Path) -> PPOConfig:
    """The configuration of `run`, under the names that this tree's PPOConfig has."""
    known = {field.name for field in fields(PPOConfig)}
    older = {new: old for old, new in RENAMED_FIELDS.items() if new not in known}
    newer = {name: value for name, value in LIKE_EARLIER.items() if name in known}
    given = {"output_dir": str(output_dir), **COMMON, **newer, **run.fields}
    if given.get("critic", "scalar") == "scalar" and given.get("adv_estimator", "gae") == "gae":
        # The default of earlier commits.
        given.setdefault("cliprange_value", 0.2)
    filled = {k: v.format(inputs=inputs) if isinstance(v, str) and "{inputs}" in v else v for k, v in given.items()}
    return PPOConfig(**{older.get(name, name): value for name, value in filled.items()})


def make_trainer(run: Run, output_dir: Path, inputs: Path, *, resumes: bool) -> Any:
    """The trainer of `run`; it stops early where the run does, unless this process `resumes` it."""
    trainer_class = PPOTrainer if run.trainer == "PPOTrainer" else getattr(trainers, run.trainer)
    if run.stop == "signal" and not resumes:
        trainer_class = trainers.Signalled
    from_folder = run.model == "folder"
    model: Any = adapted_lm() if run.model == "adapter" else None
    return trainer_class(
        model=str(inputs / "policy") if from_folder else model or causal_lm(run.model),
        reward_funcs=reward_sources(run.reward, inputs),
        args=config_of(run, output_dir, inputs),
        train_dataset=prompts(40),
        eval_dataset=prompts(run.eval_prompts) if run.eval_prompts else None,
        processing_class=None if from_folder else tokenizer(),
        peft_config=lora_config() if run.lora else None,
        callbacks=[trainers.StopAfterStep()] if run.stop == "step" and not resumes else [],
    )


def train(run: Run, output_dir: Path, inputs: Path, *, resumes: bool) -> None:
    """Trains `run` in this process, on whose rank and on `resumes` its random numbers depend."""
    seed = 100 * resumes + int(os.environ.get("RANK", 0))
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    trainer = make_trainer(run, output_dir, inputs, resumes=resumes)
    trainer.train(resume_from_checkpoint=resumes or None)


def forked(run: Run, output_dir: Path, inputs: Path, *, resumes: bool, environment: dict[str, str]) -> int:
    """The id of a new process that trains `run` and then ends; its output goes to `output_dir`.log."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.environ.update(environment)
        # Makes a new thread pool for torch, before the threads that load weights all ask for it at once.
        torch.set_num_threads(1)
        with open(output_dir.with_suffix(".log"), "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        train(run, output_dir, inputs, resumes=resumes)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def launch(run: Run, output_dir: Path, inputs: Path, *, resumes: bool) -> list[int]:
    """The exit statuses of the processes of `run`, which are over."""
    environments: list[dict[str, str]] = [{}]
    if run.processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        world = {"WORLD_SIZE": str(run.processes), "LOCAL_WORLD_SIZE": str(run.processes)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environments = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(run.processes)]
    started = [forked(run, output_dir, inputs, resumes=resumes, environment=env) for env in environments]
    return _wait_for(started)


def _wait_for(started: Sequence[int]) -> list[int]:
    """The exit statuses of these processes; once one has failed or time is up, the others are killed."""
    running, statuses, end = set(started), dict.fromkeys(started, 0), time.monotonic() + _SECONDS
    while running:
        for child in list(running):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                running.discard(child)
                statuses[child] = os.waitstatus_to_exitcode(status)
        failed = any(status not in (0, _SIGTERM_STATUS) for status in statuses.values())
        if running and (failed or time.monotonic() > end):
            for child in running:
                os.kill(child, 9)
        time.sleep(0.01)
    return list(statuses.values())


@contextmanager
def one_at_a_time(run: Run) -> Iterator[None]:
    """Waits until no other runner of this comparison has a run of several processes, if `run` is one."""
    if run.processes == 1:
        yield
        return
    with open(Path.cwd().parent / "several_processes.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make(name: str) -> None:
    """Makes the run `name` in a folder of its name; where it fails, FAILED there has its last lines."""
    run, output_dir, inputs = RUNS[name], Path(name), Path("inputs") / name
    write_inputs(inputs, model=run.model, reward=run.reward)
    with one_at_a_time(run):
        begun = time.monotonic()
        for resumes in [False] if run.stop is None else [False, True]:
            expected = _SIGTERM_STATUS if run.stop == "signal" and not resumes else 0
            statuses = launch(run, output_dir, inputs, resumes=resumes)
            if set(statuses) != {expected}:
                output_dir.mkdir(exist_ok=True)
                lines = output_dir.with_suffix(".log").read_text(errors="replace").splitlines()[-_SHOWN:]
                (output_dir / FAILED).write_text("\n".join([f"exit statuses {statuses}", *lines]) + "\n")
                break
        print(f"{Path.cwd().name:>5} {name}: {time.monotonic() - begun:.1f} s", flush=True)


def main(tree: str, *names: str) -> None:
    """Makes these runs, or all."""
    torch.set_num_threads(1)
    check_tree(Path(tree).resolve())
    chosen = names or tuple(RUNS)
    if any("deepspeed" in RUNS[name].fields for name in chosen):
        # Imported here for all runs: DeepSpeed, and torch's compiler, which its first engine asks for.
        importlib.import_module("deepspeed")
        torch.compile(lambda: None)
    for name in chosen:
        make(name)
    check_tree(Path(tree).resolve())


if __name__ == "__main__":
    main(*sys.argv[1:])
