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
            `prompt_template`, `query_len`, the most tokens of a prompt, `output_dir`, `settings`, the arguments of
            TRL's `GRPOConfig`, and `points`, how often the policy is saved.
    """
    # In TRL's environment only.
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(run["policy"], padding_side="left")
    module, _, name = run["reward_function"].partition(":")
    function, answers = getattr(importlib.import_module(module), name), 0

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        nonlocal answers
        answers += len(completions)
        return list(function(prompts=prompts, completions=completions))

    texts = [run["prompt_template"].format(**row) for row in read_rows(Path(run["prompts"]))]
    kept = [text for text in texts if len(tokenizer(text)["input_ids"]) <= run["query_len"]]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(run["policy"], dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=run["output_dir"], **run["settings"]),
        train_dataset=Dataset.from_list([{"prompt": text} for text in kept]),
        processing_class=tokenizer,
    )
    policy = trainer.model
    points = Points(Path(run["output_dir"]), run["points"], tokenizer, lambda: policy, lambda state: answers)
    trainer.add_callback(points)
    trainer.train()
    points.write(optimizer_steps=points.optimizer_steps, answers=answers)


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
