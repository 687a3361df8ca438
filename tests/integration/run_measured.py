"""A tiny run for `accelerate launch` that prints its measured and its estimated peaks as JSON.

Usage: run_measured.py OUTPUT_DIR STAGE LORA OVERRIDES; the last three are JSON.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from alpaca_ppo.distributed.fsdp_config import asks_for_fsdp
from alpaca_ppo.distributed.held_memory import Sharding
from alpaca_ppo.estimate_memory.fake_models import Models
from tests.estimate_memory.test_estimator import llama, lora, measured_peaks, predicted_peaks, saved, settings  # noqa: E402


def main(output_dir: str, stage: str, with_lora: str, overrides: str) -> None:
    """Measures two steps of a model of six million weights, then estimates them."""
    torch.set_num_threads(1)
    config = llama(hidden_size=256, intermediate_size=768, num_hidden_layers=6)
    args = settings(output_dir=output_dir, **json.loads(overrides))
    peft_config = lora() if json.loads(with_lora) else None
    measured = measured_peaks(args, peft_config, config)
    sharding = Sharding(torch.distributed.get_world_size(), json.loads(stage), fsdp=asks_for_fsdp(args))
    if torch.distributed.get_rank() == 0:
        predicted = predicted_peaks(Models(saved(config), peft_config), args, sharding)
        print("PEAKS", json.dumps({"measured": measured, "predicted": predicted}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
