"""GSM8K with a model small enough for a laptop: preparation for `train_sft.py` and `train_ppo.py`, and measurement.

    python -m examples.gsm8k_tiny prepare gsm8k.jsonl
    python -m examples.gsm8k_tiny measure

`prepare` reads any JSONL with GSM8K's columns `question` and `answer`. The trainings between the two commands are in
docs/getting-started.md. A model of this size cannot reason; it can learn to end with a well-formed `#### number`.
"""

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from alpaca_ppo.data import PromptForm, collate_prompts, load_prompt_dataset, prepare_prompts
from alpaca_ppo.generation import resolve_stop_tokens
from alpaca_ppo.generation.responses import SamplingParams
from alpaca_ppo.models import Policy, load_causal_lm
from alpaca_ppo.ppo.rollouts import ForwardRows, forward_responses, sample_responses
from alpaca_ppo.types import PromptBatch
from examples.mini_farm.base import write_base
from examples.rewards.gsm8k import correctness, well_formed

PROMPT_TEMPLATE = "{question}\n"
QUERY_LEN = 160
RESPONSE_LEN = 128
_MAX_LENGTH = 320
_BATCH = 64


def prepare(data: str, folder: Path, *, sft_rows: int, test_rows: int, seed: int, **shape: int) -> None:
    """Writes `base` (a tokenizer and an untrained Llama) and three disjoint splits to `folder`.

    The splits are sft.jsonl, test.jsonl and, with all other rows, ppo.jsonl. The tokenizer is trained on sft.jsonl.

    Args:
        data: JSONL with the columns `question` and `answer`, or any other dataset name for `load_prompt_dataset`.
        folder: created if missing.
        sft_rows: rows of sft.jsonl.
        test_rows: rows of test.jsonl.
        seed: seed of the split and of the model's weights.
        shape: `vocab_size` of the tokenizer, `hidden_size`, `num_layers` and `num_heads` of the model.

    Raises:
        ValueError: if a column is missing, or no rows are left for PPO.
    """
    rows = load_prompt_dataset(data, split="train")
    if missing := {"question", "answer"} - set(rows.column_names):
        raise ValueError(f"{data} has no column {sorted(missing)}, only {rows.column_names}; use a GSM8K file")
    if len(rows) <= sft_rows + test_rows:
        raise ValueError(
            f"{data} has {len(rows)} rows, but sft_rows ({sft_rows}) and test_rows ({test_rows}) leave none for PPO; "
            "lower one of them"
        )
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    parts = {"sft": order[:sft_rows], "test": order[sft_rows:][:test_rows], "ppo": order[sft_rows + test_rows :]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, indices in parts.items():
        rows.select(indices).to_json(folder / f"{name}.jsonl", force_ascii=False)
    texts = (PROMPT_TEMPLATE.format(**row) + row["answer"] for row in rows.select(parts["sft"]))
    write_base(folder / "base", texts, seed=seed, max_length=_MAX_LENGTH, **shape)


def measure(model: Path, reference: Path, rows: Dataset, *, do_sample: bool, seed: int = 0) -> dict[str, float]:
    """Returns how the model in the folder `model` answers `rows`, with one response per row.

    `well_formed` and `correct` are the fractions of rows whose response ended with a stop token and ends with a
    well-formed, or the correct, result. `standard_error` is that of `well_formed`. `length` is in tokens. `kl` is the
    KL to the model in the folder `reference`, in nats per response (for sampled responses an unbiased estimate).
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy, prior = Policy(load_causal_lm(str(model))).eval(), Policy(load_causal_lm(str(reference))).eval()
    prompts = _prompts(rows, tokenizer)
    sampling_params = SamplingParams(
        max_new_tokens=RESPONSE_LEN,
        temperature=1.0,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=resolve_stop_tokens(tokenizer, policy.model.generation_config),
        do_sample=do_sample,
        seed=seed,
    )
    samples = sample_responses(policy.model, prompts, sampling_params, per_device_batch_size=_BATCH)
    evaluated = ForwardRows(samples, torch.device("cpu"), per_device_batch_size=_BATCH)
    own, other = (forward_responses(p, evaluated, temperature=1.0, chunk_size=4096) for p in (policy, prior))
    texts = tokenizer.batch_decode(samples["responses"], skip_special_tokens=True)
    answers = [row["answer"] for row in prompts["rows"]]
    stopped = samples["stopped"].float()
    fraction = float((torch.tensor(well_formed(texts)) * stopped).mean())
    return {
        "well_formed": fraction,
        "standard_error": math.sqrt(fraction * (1 - fraction) / len(texts)),
        "stopped": float(stopped.mean()),
        "correct": float((torch.tensor(correctness(texts, answers)) * stopped).mean()),
        "length": float(samples["response_mask"].sum(dim=1).float().mean()),
        "kl": float((own["logprobs"] - other["logprobs"]).sum(dim=1).mean()),
    }


def _prompts(rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> PromptBatch:
    prompts = prepare_prompts(rows, tokenizer, query_len=QUERY_LEN, form=PromptForm(prompt_template=PROMPT_TEMPLATE))
    pad = tokenizer.pad_token_id
    return collate_prompts(list(prompts), range(len(prompts)), pad_token_id=pad, query_len=QUERY_LEN)


def _print_table(folder: Path, models: Sequence[str]) -> None:
    rows = load_prompt_dataset(str(folder / "test.jsonl"))
    results: dict[str, dict[str, float]] = {}
    for name in models:
        for do_sample in (True, False):
            figures = measure(folder / name, folder / "sft", rows, do_sample=do_sample)
            label = f"{name}, {'sampled' if do_sample else 'greedy'}"
            if not results:
                print(f"{'':32}" + "".join(f"{column:>16}" for column in figures))
            print(f"{label:32}" + "".join(f"{value:16.3f}" for value in figures.values()), flush=True)
            results[label] = figures
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command in `argv`, by default the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("prepare", help="write the base model and the splits")
    first.add_argument("data", help="JSONL with GSM8K's columns question and answer")
    sizes = {"sft_rows": 2000, "test_rows": 500, "vocab_size": 3000, "hidden_size": 256, "num_layers": 4}
    for name, default in {**sizes, "num_heads": 8, "seed": 0}.items():
        first.add_argument(f"--{name}", type=int, default=default)
    second = commands.add_parser("measure", help="measure how models answer the questions of test.jsonl")
    second.add_argument("--models", nargs="+", default=["sft", "ppo/final/policy"], help="model folders, in --folder")
    for command in (first, second):
        command.add_argument("--folder", type=Path, default=Path("outputs/gsm8k_tiny"), help="folder for all results")
    arguments = vars(parser.parse_args(argv))
    if arguments.pop("command") == "prepare":
        prepare(**arguments)
    else:
        _print_table(**arguments)


if __name__ == "__main__":
    main()
