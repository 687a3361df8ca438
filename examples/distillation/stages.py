"""Teacher, students and data: SmolLM2-135M-Instruct, some of its layers, and sentences from given words."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.supervised.sft import train_sft
from examples.long_horizon.pipeline import flags_of
from examples.mini_farm.splits import read_rows, write_rows
from examples.sentences.task import HELD_OUT, TRAINING, chat_text, draw_prompts, share_used

TEMPERATURE = 0.7
"""At which SmolLM2 writes sense. Its logits are divided by it, and everything here samples at 1."""
RESPONSE_LEN, QUERY_LEN = 32, 64
_PROMPTS_AT_ONCE = 16


def write_prompts(folder: Path, *, count: int, held_out: bool, seed: int) -> None:
    """`folder`/prompts.jsonl: texts of the chat template."""
    drawn = draw_prompts(count, split=HELD_OUT if held_out else TRAINING, seed=seed)
    write_rows(folder / "prompts.jsonl", [{"prompt": chat_text(row)} for row in drawn])


def write_sharpened(folder: Path, model: Path) -> None:
    """The model with logits divided by `TEMPERATURE`."""
    sharpened = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        sharpened.model.norm.weight /= TEMPERATURE
    _save(sharpened, model, folder)


def write_student(folder: Path, teacher: Path, *, layers: Sequence[int]) -> None:
    """These layers of the teacher, its embeddings and its head."""
    student = AutoModelForCausalLM.from_pretrained(teacher)
    student.model.layers = torch.nn.ModuleList([student.model.layers[number] for number in layers])
    for position, layer in enumerate(student.model.layers):
        layer.self_attn.layer_idx = position
    student.config.num_hidden_layers = len(layers)
    _save(student, teacher, folder)


def _save(model: PreTrainedModel, source: Path, folder: Path) -> None:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def write_demonstrations(folder: Path, teacher: Path, prompts: Path, *, answers: int, seed: int) -> None:
    """`folder`/demonstrations.jsonl: so many answers of the teacher to each prompt, without those that are cut off."""
    rows, tokenizer = read_rows(prompts / "prompts.jsonl"), AutoTokenizer.from_pretrained(teacher)
    with TemporaryDirectory() as unused:
        sizes: dict[str, Any] = {"query_len": QUERY_LEN, "response_len": RESPONSE_LEN}
        args = PPOConfig(output_dir=unused, report=False, report_to="none", use_cpu=True, **sizes)
        trainer = PPOTrainer(
            model=str(teacher), args=args, reward_funcs=share_used, train_dataset=Dataset.from_list(rows)
        )
        texts: list[dict[str, str]] = []
        for first in range(0, len(rows), _PROMPTS_AT_ONCE):
            part = [row["prompt"] for row in rows[first : first + _PROMPTS_AT_ONCE]]
            given = trainer.generate(part, num_return_sequences=answers, seed=seed * len(rows) + first)
            pairs = [(prompt, text) for prompt, of in zip(part, given, strict=True) for text in of]
            texts += [{"prompt": prompt, "completion": text} for prompt, text in pairs]
    lengths = [len(ids) for ids in tokenizer([row["completion"] for row in texts])["input_ids"]]
    whole = [row for row, length in zip(texts, lengths, strict=True) if length < RESPONSE_LEN]
    write_rows(folder / "demonstrations.jsonl", whole)


def fine_tune(folder: Path, model: Path, demonstrations: Path, *, rate: float, passes: int, seed: int) -> None:
    """Trains `model` on demonstrations by `alpaca-ppo sft`."""
    options = {
        "model_name_or_path": model,
        "dataset_name": demonstrations / "demonstrations.jsonl",
        "output_dir": folder,
        "prompt_template": "{prompt}",
        "max_length": QUERY_LEN + RESPONSE_LEN,
        "per_device_train_batch_size": 32,
        "train_sampling_strategy": "group_by_length",
        "num_train_epochs": passes,
        "learning_rate": rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "seed": seed,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
    }
    train_sft(flags_of(options))


def loss_on(demonstrations: Sequence[Mapping[str, str]], model: Path) -> float:
    """Cross-entropy of the completions and their ends in nats per token: of the teacher's answers, it is the KL of the
    teacher to `model` and the teacher's entropy.
    """
    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    total, tokens = 0.0, 0
    for row in demonstrations:
        prompt, completion = (tokenizer(row[name])["input_ids"] for name in ("prompt", "completion"))
        ids = torch.tensor([*prompt, *completion, tokenizer.eos_token_id])
        with torch.no_grad():
            logprobs = policy(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        total -= logprobs.gather(-1, ids[len(prompt) :, None]).sum().item()
        tokens += len(logprobs)
    return total / tokens
