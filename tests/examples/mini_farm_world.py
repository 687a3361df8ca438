"""Tiny models and data of the laboratory for its tests: a few rows, and untrained models with one narrow layer."""

from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from examples.mini_farm.base import write_base
from examples.mini_farm.splits import Row, draw_splits, prompt_of

SIZES = {"sft": 64, "preference": 16, "unlabeled": 8, "val": 16}


def some_rows() -> dict[str, list[Row]]:
    return draw_splits(0, SIZES)


def write_language_model(folder: Path, *, seed: int = 0) -> Path:
    texts = [prompt_of(row) + row["output"] for row in some_rows()["sft"]]
    write_base(folder, texts, vocab_size=500, seed=seed, hidden_size=16, num_layers=1, num_heads=2, max_length=96)
    return folder


def write_reward_model(folder: Path, language_model: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(language_model)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(
        language_model, num_labels=1, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
