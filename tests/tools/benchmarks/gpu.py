"""The part of examples/performance.md that needs a GPU: `python -m tests.tools.benchmarks.gpu`, half an hour on one.

Decoding in each way of `examples.gpu_speed` at several numbers of rows; the update's FLOPs a second, as a share of the
device's peak in bfloat16 (those that its tokens need, so recomputed activations and padding lower it); and the memory
of the 7B shapes. `examples.gpu_smoke` says beforehand, in five minutes, what works there.
"""

import argparse
import copy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from alpaca_ppo import PPOConfig, PPOTrainer
from examples.gpu_speed import WAYS, Peak, build, decoding_speed, peak_of
from examples.memory_cells import adapter, tokenizer
from tests.tools.benchmarks.flops import needed_flops
from tests.tools.benchmarks.programs import ROOT
from tests.tools.benchmarks.report import write_between_markers
from tests.tools.benchmarks.step import PAGE

BEGIN = "<!-- the benchmark writes this where it finds a GPU -->"
ROWS = (64, 256, 512)
UPDATES = {"0.5B": False, "1.5B": False, "7B": True}
"""Shapes whose update is measured, and whether they train adapters on one base instead of all weights."""


def decoding_table(
    device: torch.device,
    peak: Peak,
    *,
    shapes: Sequence[str] = ("0.5B", "1.5B", "7B"),
    rows: Sequence[int] = ROWS,
    ways: Sequence[str] = tuple(WAYS),
    dtype: torch.dtype = torch.bfloat16,
    **sizes: int,
) -> list[str]:
    """Tokens a second and the share of the memory bandwidth, for each shape and number of rows in each way."""
    lines = [f"| decoding, tokens/s (share of bandwidth) | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    for shape in shapes:
        model = build(shape, device, dtype)
        for count in rows:
            speeds = [decoding_speed(model, way, peak, rows=count, **sizes) for way in ways]
            cells = [f"{speed.tokens_per_second:.0f} ({speed.bandwidth_share:.0%})" for speed in speeds]
            lines.append(f"| {shape}, {count} rows | {' | '.join(cells)} |")
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return lines


@dataclass(frozen=True)
class Update:
    """What an update took."""

    flops: int
    """That its tokens need."""
    seconds: float

    def share(self, peak: Peak) -> float:
        """The FLOPs a second as a share of the device's peak."""
        return self.flops / self.seconds / peak.flops_per_second


def measured_update(
    shape: str, device: torch.device, *, lora: bool, rows: int = 64, tokens: int = 512, **settings: Any
) -> Update:
    """The second step's update: half of `tokens` in the prompt, half in the response; micro-batches of an eighth of the
    rows.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = PPOConfig(
            output_dir=folder,
            query_len=tokens // 2,
            response_len=tokens // 2,
            rollout_batch_size=rows,
            rollout_per_device_batch_size=rows,
            step_batch_size=rows,
            step_per_device_batch_size=max(1, rows // 8),
            total_episodes=2 * rows,
            ppo_epochs=1,
            critic_epochs=None,
            num_logged_rollouts=0,
            report_to=["none"],
            **{"bf16": not lora, "use_cpu": device.type == "cpu", **settings},
            **({"critic_layout": "adapter", "reference": "adapter_off"} if lora else {"critic_layout": "separate"}),
        )
        prompt = " ".join(f"w{i % 96}" for i in range(tokens // 2))
        trainer = PPOTrainer(
            model=build(shape, device, torch.bfloat16 if lora else torch.float32),
            reward_funcs=_no_reward,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": prompt}] * 2 * rows),
            processing_class=tokenizer(),
            peft_config=adapter({"lora_rank": 16}, "CAUSAL_LM") if lora else None,
        )
        responses: list[int] = []
        advance = trainer.step_with_rollouts

        def remember(rollouts: Any) -> dict[str, float]:
            responses[:] = rollouts["response_mask"].sum(dim=1).tolist()
            return advance(rollouts)

        trainer.step_with_rollouts = remember
        logs = [trainer.step(trainer.prompt_batches(step)) for step in range(2)][-1]
    policy, critic = _without_memory(shape, lora=lora)
    needed = needed_flops(
        policy,
        critic,
        None,
        critic,
        prompts=[tokens // 2] * rows,
        responses=responses,
        texts=[tokens] * rows,
        epochs=1,
        old_policy_pass=False,
    )
    return Update(needed.update, logs["time/update"])


def _without_memory(shape: str, *, lora: bool) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Policy and critic, each with the adapter that it trains, whose numbers are nowhere."""
    policy = build(shape, torch.device("meta"), torch.bfloat16)
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    with torch.device("meta"):
        critic = AutoModelForSequenceClassification.from_config(config)
        if lora:
            for model in (policy, critic):
                get_peft_model(model, adapter({"lora_rank": 16}, None))
    return policy, critic


def _no_reward(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def memory_table() -> str:
    """What `examples.memory_table` measures of the 7B shapes."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "table.md"
        command = [sys.executable, "-m", "examples.memory_table", "--shapes", "llama-7b", "qwen2.5-7b"]
        subprocess.run([*command, "--report", str(report)], cwd=ROOT, check=True)
        return report.read_text(encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU that torch can use; examples/performance.md stays as it is")
        return 1
    device = torch.device("cuda")
    peak = peak_of(device)
    lines = [
        f"Measured on one {torch.cuda.get_device_name()} ({peak.bytes_per_second / 1e12:.2f} TB/s, "
        f"{peak.flops_per_second / 1e12:.0f} TFLOPS in bfloat16; {peak.source}), torch {torch.__version__}, random "
        "weights in bfloat16, prompts of 128 tokens, responses of 256:",
        "",
        *decoding_table(device, peak),
        "",
        "| update, share of the peak FLOPs | |",
        "|---|---|",
    ]
    for shape, lora in UPDATES.items():
        share = measured_update(shape, device, lora=lora, gradient_checkpointing=lora).share(peak)
        lines.append(f"| {shape}, {'LoRA on one base' if lora else 'all weights, separate critic'} | {share:.0%} |")
    text = "\n".join([*lines, "", memory_table()])
    print(text)
    write_between_markers(PAGE, text, BEGIN)
    return 0


if __name__ == "__main__":
    sys.exit(main())
