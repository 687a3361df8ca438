"""A tiny float64 run for `accelerate launch`: trains, and the main process saves the final weights.

Usage: run_tiny.py OUTPUT_DIR [field=value ...]; values are YAML. `lora=true` trains adapters;
`poison=[[step, update], ...]` makes the loss of one row NaN there;
`resume=true` resumes; `largest_file=[step, bytes]` limits files from the end of that step on.
"""

import sys
from pathlib import Path

import torch
import yaml
from peft import LoraConfig

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.tiny_runs import LargestFile, poisoned, tiny_trainer, weights  # noqa: E402


def main(output_dir: str, *settings: str) -> None:
    overrides = {name: yaml.safe_load(value) for name, _, value in (setting.partition("=") for setting in settings)}
    resume = overrides.pop("resume", None)
    torch.set_num_threads(1)
    arguments = {}
    if overrides.pop("lora", False):
        arguments["peft_config"] = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    if largest := overrides.pop("largest_file", None):
        arguments["callbacks"] = [LargestFile(*largest)]
    if poison := overrides.pop("poison", None):
        overrides["trainer_class"] = poisoned(*map(tuple, poison))
    trainer = tiny_trainer(output_dir, dtype=torch.float64, trainer_arguments=arguments, **overrides)
    trainer.train(resume_from_checkpoint=resume)
    if trainer.accelerator.is_main_process:
        torch.save(weights(trainer), Path(output_dir) / "weights.pt")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
