"""The memory of one PPO step under each layout of critic and reference: `python -m examples.memory_table`, or `make
memory-table`.

One random Llama, one batch, and a reward model in every row: a frozen classifier of its own, in the last row an adapter
on the policy's base. Each row runs in a process of its own and is the most bytes of live tensors in one step (on a
CPU), or torch.cuda.max_memory_allocated (on a GPU), beside what `alpaca_ppo.plan` predicts. Writes
`examples/memory_table.md`.
"""

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.arguments import parse_args
from alpaca_ppo.fake_models import Models
from alpaca_ppo.live_bytes import LiveBytes
from alpaca_ppo.memory_model import Sharding, predict
from alpaca_ppo.plan import read_adapter
from alpaca_ppo.validation import argument

GIB = 2**30
REPORT = Path(__file__).with_suffix(".md")
ROWS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    # Label, LoRA, fields of PPOConfig
    "full": ("all weights train; separate critic, copied reference", False, {"reference": "copy"}),
    "separate": ("LoRA; separate critic, reference: adapter off", True, {"reference": "adapter_off"}),
    "shared": ("LoRA; shared critic, adapter off", True, {"critic_layout": "shared", "reference": "adapter_off"}),
    "adapter": ("LoRA; critic adapter, adapter off", True, {"critic_layout": "adapter", "reference": "adapter_off"}),
    "reward": (
        "LoRA; critic adapter, adapter off, reward adapter",
        True,
        {"critic_layout": "adapter", "reference": "adapter_off"},
    ),
}


@dataclass(frozen=True)
class TableArguments:
    """The model, 113 million weights by default, and the batch.

    Raises:
        ValueError: for a row that there is not.
    """

    hidden_size: int = argument(768, "Of the model.")
    intermediate_size: int = argument(2048, "Of the model.")
    num_hidden_layers: int = argument(12, "Of the model.")
    num_attention_heads: int = argument(12, "Of the model.")
    num_key_value_heads: int = argument(4, "Of the model.")
    vocab_size: int = argument(24000, "Of the model.")
    rows: int = argument(4, "Prompts of the step, sampled and scored at once.")
    micro_rows: int = argument(2, "Responses of a micro-batch.")
    query_len: int = argument(64, "Tokens of a prompt.")
    response_len: int = argument(64, "Tokens of a response.")
    lora_rank: int = argument(16, "Of every adapter.")
    report: str = argument(str(REPORT), "File to write.")
    only: str | None = argument(None, f"One row alone, as JSON: {', '.join(ROWS)}.")

    def __post_init__(self) -> None:
        if self.only is not None and self.only not in ROWS:
            raise ValueError(f"only is {self.only!r}; choose one of {', '.join(ROWS)}")


def model_config(table: TableArguments) -> Any:
    """The configuration of policy, critic, reference and reward model."""
    names = [field.name for field in fields(table)][:6]
    sizes = {name: getattr(table, name) for name in names}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 1}
    return AutoConfig.for_model("llama", **sizes, **special, tie_word_embeddings=False)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each of a hundred ids: the text does not matter here."""
    words = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{n}" for n in range(96))])}
    model = Tokenizer(WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def adapter(table: TableArguments, task_type: str) -> LoraConfig:
    """LoRA on every linear layer of the decoder."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return LoraConfig(r=table.lora_rank, target_modules=names, task_type=task_type)


def save_reward_adapter(table: TableArguments, folder: str) -> None:
    """A reward adapter with random weights, in the form that train_reward_model.py --use_peft writes."""
    classifier = AutoModelForSequenceClassification.from_config(model_config(table))
    get_peft_model(classifier, adapter(table, "SEQ_CLS")).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def settings(table: TableArguments, name: str, folder: str) -> PPOConfig:
    """The configuration of a row; two optimizer steps, so that the optimizer's state is there in the second."""
    sizes: dict[str, Any] = {
        "query_len": table.query_len,
        "response_len": table.response_len,
        "rollout_batch_size": table.rows,
        "rollout_per_device_batch_size": table.rows,
        "step_batch_size": table.rows,
        "step_per_device_batch_size": table.micro_rows,
    }
    quiet: dict[str, Any] = {"output_dir": f"{folder}/run", "report_to": ["none"], "num_logged_rollouts": 0}
    if name == "reward":
        quiet["reward_adapter"] = f"{folder}/reward"
    return PPOConfig(**sizes, **quiet, **ROWS[name][2], ppo_epochs=2, total_episodes=table.rows)


def run_row(table: TableArguments, name: str) -> dict[str, float]:
    """`measured` and `predicted` bytes of a row's highest moment."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        if name == "reward":
            save_reward_adapter(table, f"{folder}/reward")
        args, config = settings(table, name, folder), model_config(table)
        lora = adapter(table, "CAUSAL_LM") if ROWS[name][1] else None
        parts: dict[str, Any] = {"lora": adapter(table, "CAUSAL_LM") if lora else None, "rewards": (config,)}
        if name == "reward":
            parts |= {"rewards": (), "reward_lora": read_adapter("reward_adapter", f"{folder}/reward")}
        predicted = max(moment.total for moment in predict(Models(config, **parts), args, Sharding()))
        rewards = [] if name == "reward" else [AutoModelForSequenceClassification.from_config(config)]
        prompt = " ".join(f"w{i % 96}" for i in range(table.query_len))
        trainer = PPOTrainer(
            model=AutoModelForCausalLM.from_config(config, dtype=torch.float32),
            reward_funcs=rewards,
            reward_processing_classes=[tokenizer() for _ in rewards],
            args=args,
            train_dataset=Dataset.from_list([{"prompt": prompt}] * table.rows),
            processing_class=tokenizer(),
            peft_config=lora,
        )
        del rewards
        return {"measured": float(step_peak(trainer)), "predicted": predicted}


def step_peak(trainer: PPOTrainer) -> int:
    """The most bytes alive in the training of one step, of tensors on the trainer's device."""
    gc.collect()
    if trainer.accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        trainer.step(trainer.prompt_batches(0))
        return torch.cuda.max_memory_allocated()
    live = LiveBytes()
    live.see_all()
    live.restart()
    with live:
        trainer.step(trainer.prompt_batches(0))
    return live.peak


def report(table: TableArguments, rows: dict[str, dict[str, float]], device: str) -> str:
    """The Markdown table of measured rows."""
    with torch.device("meta"):
        count = AutoModelForCausalLM.from_config(model_config(table)).num_parameters()
    what = "torch.cuda.max_memory_allocated" if device != "CPU" else "bytes of live tensors"
    lines = [
        f"A random Llama of {count / 1e6:.0f} million float32 weights; {table.rows} prompts of {table.query_len} "
        f"tokens with responses of at most {table.response_len}, micro-batches of {table.micro_rows}, LoRA rank "
        f"{table.lora_rank}. A reward model of the policy's size in every row but the last, whose reward model is an "
        f"adapter. Peak of one PPO step on a {device} ({what}); `python -m examples.memory_table`.",
        "",
        "| layout | peak, GiB | of the first row | planned, GiB |",
        "|---|---|---|---|",
    ]
    first = next(iter(rows.values()))["measured"]
    for name, row in rows.items():
        share = row["measured"] / first
        lines.append(f"| {ROWS[name][0]} | {row['measured'] / GIB:.2f} | {share:.2f} | {row['predicted'] / GIB:.2f} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures every row, prints the table and writes it to `report`."""
    (table,) = parse_args([TableArguments], argv)
    if table.only is not None:
        print(json.dumps(run_row(table, table.only)))
        return
    given = {name: value for name, value in asdict(table).items() if name not in ("only", "report")}
    flags = [f"--{name}={value}" for name, value in given.items()]
    rows = {}
    for name in ROWS:
        command = [sys.executable, "-m", "examples.memory_table", *flags, f"--only={name}"]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows[name] = json.loads(output.splitlines()[-1])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    text = report(table, rows, device)
    print(text)
    Path(table.report).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
