"""How the tests start processes, and the folders and run.yaml of a tiny run as users have it."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tests.tiny_models import tiny_causal_lm, tiny_tokenizer
from tests.tiny_runs import prompts
from tests.tools.warm_python import warm_python

ROOT = Path(__file__).parents[2]
LAUNCH_CONFIGS = ROOT / "examples/accelerate_configs"
RUN_TINY = Path(__file__).with_name("run_tiny.py")
HANG = 3000
"""Seconds after which a test takes a program for hung, however slow and busy the machine."""
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    # Where there is a GPU: DeepSpeed takes what it finds.
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    # As its launcher sets it; without it DeepSpeed starts numactl before many a collective.
    "LOCAL_SIZE": "1",
}


def write_run(folder: Path) -> Path:
    """Writes model, prompts and reward of a run of two steps of two optimizer steps; returns its run.yaml."""
    tiny_causal_lm("llama").save_pretrained(folder / "policy")
    tiny_tokenizer().save_pretrained(folder / "policy")
    prompts(20).to_json(folder / "train.jsonl")
    (folder / "rewards.py").write_text(
        "def even(prompts, completions, completion_ids, **columns):\n"
        "    return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]\n"
    )
    settings = {
        "model_name_or_path": str(folder / "policy"),
        "reward_funcs": f"{folder / 'rewards.py'}:even",
        "dataset_name": str(folder / "train.jsonl"),
        "query_len": 4,
        "response_len": 4,
        "rollout_batch_size": 10,
        "rollout_per_device_batch_size": 5,
        "step_batch_size": 5,
        "step_per_device_batch_size": 2,
        "learning_rate": 1e-3,
        "save_steps": 0,
        "use_cpu": True,
        "report_to": "none",
        "num_inspected_prompts": 1,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder / "run.yaml"


def command(
    script: Path | str, *arguments: Path | str, config: str | None = None, python: str = sys.executable
) -> list[str]:
    """What starts `script`: a plain process, or `accelerate launch` with the launch configuration named `config`, such
    as fsdp, or fsdp-3 with three processes.
    """
    start = [python]
    if config is not None:
        config, _, processes = config.partition("-")
        start += ["-m", "accelerate.commands.launch", "--config_file", str(LAUNCH_CONFIGS / f"{config}.yaml")]
        # Any free port.
        start += [] if config == "single" else ["--main_process_port", "0"]
        start += ["--num_processes", processes] if processes else []
    return [*start, str(script), *map(str, arguments)]


def start(
    script: Path | str,
    *arguments: Path | str,
    config: str | None = None,
    python: str | None = None,
    timeout: float = HANG,
) -> subprocess.CompletedProcess:
    """Runs the `command`, with `warm_python` unless another is given, and waits for its end."""
    whole = command(script, *arguments, config=config, python=python or warm_python())
    return subprocess.run(whole, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout)


def start_tiny(config: str | None, *runs: tuple[Path | str, ...]) -> str:
    """Makes `runs` (output folder, field=value, ...) of run_tiny.py one after the other in the same processes, which
    must succeed; returns what they print.
    """
    arguments = [part for run in runs for part in ("then", *run)][1:]
    outcome = start(RUN_TINY, *arguments, config=config)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    count = 1 if config in (None, "single") else int(config.partition("-")[2] or 2)
    assert outcome.stdout.count(f"each of {count} processes") == len(runs), outcome.stdout
    return outcome.stdout + outcome.stderr


def proves(request: pytest.FixtureRequest) -> bool:
    """Whether any test of the module that `request` is of was selected that only `make proof` runs."""
    items = (item for item in request.session.items if item.path == request.path)
    return any(item.get_closest_marker("proof") for item in items)


def survivors(processes: list[psutil.Process], *, seconds: float) -> list[psutil.Process]:
    """Those of `processes` that have not ended within `seconds`. A zombie has ended: whoever inherits it may be slow to
    ask how, or never ask.
    """
    deadline = time.monotonic() + seconds
    while (alive := [process for process in processes if _is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
