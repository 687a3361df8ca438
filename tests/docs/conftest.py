"""A folder in which the commands and programs of the pages can be tried: tiny models in place of the hub's."""

import os
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
import yaml
from datasets import Dataset

import alpaca_ppo
from alpaca_ppo import PPOConfig
from tests.docs.markdown import ROOT, all_blocks
from tests.registered import temporary_choices
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer

CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
HUB_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SMALL = {"query_len": 16, "response_len": 4, "bf16": False, "use_cpu": True, "report_to": ["none"]}
RUN = {"model_name_or_path": "model", "dataset_name": "prompts.jsonl", "reward_funcs": ["my_rewards.py:polite"]}
"""What a run.yaml holds at least."""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A tiny causal model with a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    tiny_causal_lm("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def workplace(tmp_path, monkeypatch, model_folder) -> Iterator[Path]:
    """The current folder of a user: a clone's examples/, a run.yaml, the files that the pages show, and models under
    the names that the pages use. What files of his register is forgotten afterwards.
    """
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "examples", tmp_path / "examples")
    own = ("model", "outputs/sft", "outputs/gsm8k_tiny/base", "outputs/ppo/final/policy")
    for name in (HUB_MODEL, "Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-3B-Instruct", *own):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(model_folder, tmp_path / name)
    for name in ("run.yaml", "outputs/ppo/run.yaml"):
        (tmp_path / name).write_text(yaml.safe_dump(RUN))
    for block in all_blocks("python"):
        if block.file_name:
            (tmp_path / block.file_name).write_text(block.text)
    load_files = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **k: load_files(*a, **k) if "data_files" in k else load_rows(*a, **k)
    )
    monkeypatch.setattr(alpaca_ppo, "PPOConfig", small_config, raising=False)
    with temporary_choices():
        yield tmp_path


def load_rows(name: str, split: str) -> Dataset:
    """Eight rows in Alpaca's form, in place of the hub's."""
    assert (name, split) == ("tatsu-lab/alpaca", "train")
    return Dataset.from_list([{"instruction": f"w{10 + i}", "input": "w5" if i % 2 else ""} for i in range(8)])


def small_config(**given) -> PPOConfig:
    """The configuration that a page asks for, with short texts and on the CPU."""
    return PPOConfig(**{"save_steps": 0, **given, **SMALL})
