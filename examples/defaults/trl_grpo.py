"""GRPO by TRL's `GRPOTrainer` on a task with a reward function. `trl_run` runs this in TRL's own virtual environment.

It writes the policy at points of the run, and points.json with the responses and processor seconds until each.
"""

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.defaults.trl_points import Points
from examples.mini_farm.splits import read_rows


def train(run: Mapping[str, Any]) -> None:
    """Trains with TRL.

    Args:
        run: `policy` (a folder), `reward_function` ("module:function"), `prompts` (a .jsonl file of rows),
            `prompt_template`, `output_dir`, `settings`, the arguments of TRL's `GRPOConfig`, and `points`, how often
            the policy is saved.
    """
    # In TRL's environment only.
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(run["policy"], padding_side="left")
    module, _, name = run["reward_function"].partition(":")
    texts = [run["prompt_template"].format(**row) for row in read_rows(Path(run["prompts"]))]
    args = GRPOConfig(output_dir=run["output_dir"], **run["settings"])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(run["policy"], dtype=torch.float32),
        reward_funcs=getattr(importlib.import_module(module), name),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=tokenizer,
    )
    responses = args.per_device_train_batch_size * args.gradient_accumulation_steps
    policy, output = trainer.model, Path(run["output_dir"])
    points = Points(output, run["points"], tokenizer, lambda: policy, lambda state: state.global_step * responses)
    trainer.add_callback(points)
    trainer.train()
    points.write(optimizer_steps=trainer.state.global_step, passes=args.num_iterations)


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
