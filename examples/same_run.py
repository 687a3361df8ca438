"""Whether a run is the same on one process and on two, under DDP, ZeRO 1, 2 and 3 and FSDP2, and for any number of
tokens in a micro-batch: `python -m examples.same_run`, or `make same-run`.

Six steps of PPO on a small random Llama on the CPU, training all weights (separate critic, copied reference) and with
LoRA (critic adapter, reference: adapter off). Each run is started as a user would, with `accelerate launch
--config_file`, and is compared with the run on one process whose optimizer steps are one micro-batch each. Writes
`examples/same_run.md`, and ends with an error if any token of the first step differs, a metric of that step differs by
more than 1e-5, or the final weights by more than 1e-4.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import yaml

from alpaca_ppo.config.fields import argument
from alpaca_ppo.config.parser import parse_args
from examples.mini_farm.base import write_base

ROOT = Path(__file__).parents[1]
REPORT = Path(__file__).with_suffix(".md")
PROCESSES = {
    # Name of the launch configuration, label
    "single": "1 process",
    "ddp": "2 processes, DDP",
    "zero1": "2 processes, ZeRO 1",
    "zero2": "2 processes, ZeRO 2",
    "zero3": "2 processes, ZeRO 3",
    "fsdp": "2 processes, FSDP2",
}
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("all weights", {"critic_layout": "separate", "reference": "copy"}),
    "lora": ("LoRA", {"use_peft": True, "lora_r": 4, "critic_layout": "adapter", "reference": "adapter_off"}),
}
METRIC_BOUND, WEIGHT_BOUND = 1e-5, 1e-4
STEPS, ROWS, STEP_ROWS = 6, 16, 8
QUERY_LEN, RESPONSE_LEN = 12, 12
ROW_TOKENS = QUERY_LEN + RESPONSE_LEN
MICRO_BATCHES = (ROW_TOKENS, 2 * ROW_TOKENS, STEP_ROWS * ROW_TOKENS)
"""Tokens: the fewest that a micro-batch may be limited to, twice as many, and those of a whole optimizer step."""
# Metrics that depend on time, memory or the layout of micro-batches.
NOT_COMPARED = ("time/", "memory/", "tokens/per_second", "tokens/sampled_per_second", "ppo/padding")
# The last two keep DeepSpeed from using a GPU.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
}


@dataclass(frozen=True)
class SameRunArguments:
    """Where the table goes."""

    report: str = argument(str(REPORT), "File to write.")


@dataclass(frozen=True)
class Difference:
    """How far a run is from the one it is compared with."""

    tokens: int
    """Number of responses in the first step that differ in any token."""
    metric: float
    """Largest difference of a metric of the first step, relative if the metric is above 1."""
    metric_name: str
    weights: float
    """Norm of the difference over the norm, for the worst tensor of the final policy and critic."""

    @property
    def within_bounds(self) -> bool:
        """Whether the two count as the same run."""
        return self.tokens == 0 and self.metric <= METRIC_BOUND and self.weights <= WEIGHT_BOUND


def write_run(folder: Path) -> None:
    """Writes model, prompts, reward and run.yaml into the existing `folder`."""
    words = [f"{first}{second}" for first in "bdgklmnprst" for second in "aeiou"]
    texts = [" ".join(words[(7 * i + 3 * j) % len(words)] for j in range(2 + i % 5)) for i in range(ROWS * 4)]
    write_base(folder / "model", texts, vocab_size=40, seed=0, hidden_size=64, num_layers=2, num_heads=4, max_length=64)
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    (folder / "rewards.py").write_text(
        "def even(prompts, completions, completion_ids, **columns):\n"
        "    return [sum(token % 2 == 0 for token in ids) / 4 for ids in completion_ids]\n"
    )
    settings = {
        "model_name_or_path": str(folder / "model"),
        "reward_funcs": f"{folder / 'rewards.py'}:even",
        "dataset_name": str(folder / "train.jsonl"),
        "query_len": QUERY_LEN,
        "response_len": RESPONSE_LEN,
        "rollout_batch_size": ROWS,
        "rollout_per_device_batch_size": 8,
        "step_batch_size": STEP_ROWS,
        "total_episodes": STEPS * ROWS,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "critic_epochs": None,
        "kl_coef": 0.05,
        "kl_controller": "fixed",
        "num_logged_rollouts": ROWS,
        "save_steps": 0,
        "use_cpu": True,
        "report_to": "none",
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))


def launch(
    folder: Path,
    processes: str,
    trained: str,
    micro_batch: int,
    *,
    count: int | None = None,
    environment: Mapping[str, str] = ENVIRONMENT,
    **settings: Any,
) -> Path:
    """Runs train_ppo.py on what `write_run` wrote, with `settings` as further flags; returns its output folder.

    Args:
        folder: where `write_run` wrote.
        processes: one of PROCESSES.
        trained: one of TRAINED.
        micro_batch: tokens that a micro-batch may have.
        count: number of processes; None = as in the launch configuration.
        environment: variables that are set; by default those that keep the run on the CPU.
        settings: further options of the run.

    Raises:
        RuntimeError: when it fails.
    """
    output = folder / f"{processes}-{trained}-{micro_batch}"
    given = {"output_dir": output, "max_tokens_per_micro_batch": micro_batch, **TRAINED[trained][1], **settings}
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", f"examples/accelerate_configs/{processes}.yaml"]
    command += [] if count is None else ["--num_processes", str(count)]
    # Any free port, so that two such commands can run at once.
    command += [] if processes == "single" else ["--main_process_port", "0"]
    command += ["examples/train_ppo.py", "--config", str(folder / "run.yaml")]
    command += [part for name, value in given.items() for part in (f"--{name}", str(value))]
    variables = {**os.environ, **environment}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, errors = process.communicate(timeout=600)
        except BaseException:
            # The launcher's own processes would go on without it.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    count = count or (1 if processes == "single" else 2)
    if process.returncode or f"each of {count} processes" not in printed:
        raise RuntimeError(f"{' '.join(command)} failed:\n{printed[-2000:]}{errors[-6000:]}")
    return output


def first_responses(output: Path) -> list[tuple[int, list[int]]]:
    """Prompt and token ids of every response in the first step."""
    lines = (output / "rollouts/step_000001.jsonl").read_text().splitlines()
    assert len(lines) == ROWS
    rows = [json.loads(line) for line in lines]
    return [(row["prompt_id"], [token["id"] for token in row["tokens"]]) for row in rows]


def metric_lines(output: Path) -> list[dict[str, float]]:
    """The metrics of each step that every run must share."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(NOT_COMPARED)} for line in lines]


def compare(output: Path, reference: Path) -> Difference:
    """How far the run in `output` is from the one in `reference`."""
    tokens = sum(a != b for a, b in zip(first_responses(output), first_responses(reference), strict=True))
    ours, theirs = metric_lines(output), metric_lines(reference)
    assert len(ours) == len(theirs)
    assert ours[0].keys() == theirs[0].keys()
    metrics = {name: abs(ours[0][name] - value) / max(1.0, abs(value)) for name, value in theirs[0].items()}
    worst = max(metrics, key=lambda name: metrics[name])
    return Difference(tokens, metrics[worst], worst, weight_difference(output / "final", reference / "final"))


def weight_difference(folder: Path, reference: Path) -> float:
    """Norm of the difference over the norm, for the worst tensor of policy/ and value/."""
    worst = 0.0
    for part in ("policy", "value"):
        ours, theirs = (_tensors(where / part) for where in (folder, reference))
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            size = float(tensor.norm())
            gap = float((ours[name] - tensor).norm())
            # max would ignore NaN, since no comparison with it is True.
            worst = max(worst, gap / size if size else gap) if math.isfinite(gap) else math.inf
    return worst


def _tensors(folder: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(path)
    assert tensors, f"{folder} holds no weights"
    return tensors


Rows = Mapping[tuple[str, str, int], tuple[Difference, float]]


def report(rows: Rows, kl: Mapping[str, float]) -> str:
    """The Markdown table of differences and seconds. `kl` is that of each reference run's last step, in nats."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "deepspeed"))
    changed = ", ".join(f"{value:.2f} nats ({TRAINED[trained][0]})" for trained, value in kl.items())
    lines = [
        f"{STEPS} steps of {ROWS} prompts on a small random Llama in float32, each run compared with the one on one "
        f"process with at most {MICRO_BATCHES[-1]} tokens (of prompt and response) in a micro-batch, which holds all "
        f"{STEP_ROWS} rows of an optimizer step. Micro-batches of at most {MICRO_BATCHES[0]} tokens, the most that one "
        "row can have, are the smallest that a run accepts. Metrics: largest difference in the first step, relative if "
        "the metric is above 1. Weights: norm of the difference over the norm, for the worst tensor of the final "
        f"policy and critic. The policy has changed: its final KL per response is {changed}. "
        f"Seconds include the start of the program, on {os.cpu_count()} CPU cores, one thread per process; {packages}; "
        "`python -m examples.same_run`.",
        "",
        "| trained | processes | tokens per micro-batch | responses that differ | metrics | weights | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for (trained, processes, micro_batch), (difference, seconds) in rows.items():
        figures = f"{difference.tokens} | {difference.metric:.1e} | {difference.weights:.1e} | {seconds:.0f}"
        lines.append(f"| {TRAINED[trained][0]} | {PROCESSES[processes]} | {micro_batch} | {figures} |")
    return "\n".join(lines) + "\n"


def measure(folder: Path) -> tuple[dict[tuple[str, str, int], tuple[Difference, float]], dict[str, float]]:
    """All runs of the table, on what `write_run` wrote into `folder`, and the last KL of the reference runs."""
    rows, kl = {}, {}
    for trained in TRAINED:
        reference = folder / f"single-{trained}-{MICRO_BATCHES[-1]}"
        for processes in PROCESSES:
            for micro_batch in reversed(MICRO_BATCHES):
                start = time.monotonic()
                output = launch(folder, processes, trained, micro_batch)
                rows[trained, processes, micro_batch] = compare(output, reference), time.monotonic() - start
                print(trained, processes, micro_batch, asdict(rows[trained, processes, micro_batch][0]), flush=True)
        kl[trained] = metric_lines(reference)[-1]["objective/kl_sum_seq"]
    return rows, kl


def main(argv: Sequence[str] | None = None) -> None:
    """Makes every run, prints the table and writes it to `report`; exits with 1 if a run differs."""
    (arguments,) = parse_args([SameRunArguments], argv)
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder))
        rows, kl = measure(Path(folder))
    text = report(rows, kl)
    print(text)
    Path(arguments.report).write_text(text, encoding="utf-8")
    broken = [f"{key}: {difference}" for key, (difference, _) in rows.items() if not difference.within_bounds]
    if broken:
        sys.exit("\n".join(["these runs differ:", *broken]))


if __name__ == "__main__":
    main()
