"""A tiny run as users have it, folders and a run.yaml, and how its processes and those of `run_tiny.py` start."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.tiny_models import tiny_causal_lm, tiny_tokenizer
from tests.tiny_runs import prompts

ROOT = Path(__file__).parents[2]
# The last two where there is a GPU: DeepSpeed takes what it finds.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


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
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder / "run.yaml"


def start_tiny(config: str, *runs: tuple[Path | str, ...]) -> str:
    """Makes `runs` (output folder, field=value, ...) one after the other in the processes of the launch configuration
    `config`, which must succeed; returns what they print.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", f"examples/accelerate_configs/{config}.yaml"]
    command += [] if config == "single" else ["--main_process_port", "0"]
    command.append("tests/integration/run_tiny.py")
    for number, run in enumerate(runs):
        command += [*(["then"] if number else []), *map(str, run)]
    outcome = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    count = 1 if config == "single" else 2
    assert outcome.stdout.count(f"each of {count} processes") == len(runs), outcome.stdout
    return outcome.stdout + outcome.stderr
