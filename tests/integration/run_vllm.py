"""A tiny run that a vLLM server samples for, alone or for `accelerate launch`; the main process saves the weights.

Usage: run_vllm.py OUTPUT_DIR FAMILY [field=value ...]; values are YAML.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.tiny_models import tiny_causal_lm  # noqa: E402
from tests.tiny_runs import tiny_trainer  # noqa: E402

SIZE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""vLLM's attention on a CPU has no heads as small as those of the other tests."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 64},
}


def model_of(family: str, seed: int = 0, **more: Any) -> PreTrainedModel:
    """A random model of `family`."""
    return tiny_causal_lm(family, seed=seed, **SIZE, **FAMILIES[family], **more)


def trained(
    folder: Path, family: str, *, resume: bool = False, arguments: Any = None, tied: bool = False, **options: Any
) -> Any:
    """A trainer that has made three steps on prompts of more than a block of the server's cache, each seen thrice.

    The head of its model is tied to the embedding if that is asked for, or usual for the family.
    """
    words = [" ".join(f"w{10 + (7 * i + j * j) % 50}" for j in range(36 + 2 * i)) for i in range(10)]
    settings = {"generation_backend": "vllm", "learning_rate": 0.01, "total_episodes": 30, "query_len": 60, **options}
    given = {"train_dataset": Dataset.from_dict({"prompt": words}), **(arguments or {})}
    model = model_of(family, **({"tie_word_embeddings": True} if tied else {}))
    trainer = tiny_trainer(folder, model=model, trainer_arguments=given, **settings)
    trainer.train(resume or None)
    return trainer


if __name__ == "__main__":
    output_dir, family, *pairs = sys.argv[1:]
    options = {name: yaml.safe_load(value) for name, value in (pair.split("=", 1) for pair in pairs)}
    run = trained(Path(output_dir), family, **options)
    weights = run.updater.engine.weights()
    if run.accelerator.is_main_process:
        torch.save(weights, Path(output_dir) / "weights.pt")
