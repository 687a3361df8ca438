"""Answers of a model, sampled with the package's sampler at temperature 1, and their scores under a reward model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from alpaca_ppo.data import PromptForm, collate_prompts, prepare_prompts
from alpaca_ppo.generation import SamplingParams, generate, resolve_stop_tokens
from alpaca_ppo.models import load_causal_lm
from alpaca_ppo.models.policy import Policy
from alpaca_ppo.rewards import build_reward
from alpaca_ppo.types import PromptBatch
from examples.mini_farm.splits import PROMPT_TEMPLATE, Row, prompt_of

RESPONSE_LEN = 48
"""Longest answer, in tokens."""
QUERY_LEN = 32
"""Longest prompt, in tokens."""
_BATCH = 128


@dataclass(frozen=True)
class Answer:
    """One sampled answer."""

    text: str
    kl: float
    """Log-probability under the model less that under the reference, in nats; 0 without a reference."""


def sample_answers(
    model_folder: Path, rows: Sequence[Row], *, samples: int, seed: int, reference_folder: Path | None = None
) -> list[list[Answer]]:
    """Returns `samples` answers to each row, sampled from the model in `model_folder` at temperature 1.

    The mean of `Answer.kl` over answers is an unbiased estimate of KL(model || reference) per answer.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = load_causal_lm(str(model_folder))
    reference = Policy(load_causal_lm(str(reference_folder))) if reference_folder else None
    answers: list[list[Answer]] = [[] for _ in rows]
    for batch in _batches(rows, tokenizer, size=max(1, 4 * _BATCH // samples)):
        sampled = generate(
            model,
            batch,
            SamplingParams(
                max_new_tokens=RESPONSE_LEN,
                temperature=1.0,
                pad_token_id=tokenizer.pad_token_id,
                stop_token_ids=resolve_stop_tokens(tokenizer, model.generation_config),
                num_return_sequences=samples,
                seed=seed,
            ),
        )
        logratios = sampled.logprobs.sum(dim=1)
        if reference is None:
            logratios = torch.zeros_like(logratios)
        else:
            logratios = logratios - _logprobs(reference, batch, sampled.responses, sampled.response_mask).sum(dim=1)
        texts = tokenizer.batch_decode(sampled.responses, skip_special_tokens=True)
        for i, (text, logratio) in enumerate(zip(texts, logratios.tolist(), strict=True)):
            answers[int(batch["prompt_ids"][i // samples])].append(Answer(text, logratio))
    return answers


def proxy_rewards(reward_folder: Path, rows: Sequence[Row], texts: Sequence[str]) -> list[float]:
    """Returns the reward model's score of each text as an answer to its row."""
    scorer = build_reward(str(reward_folder), batch_size=_BATCH)
    return scorer([prompt_of(row) for row in rows], texts, [[] for _ in texts], list(rows)).rewards.tolist()


def _batches(rows: Sequence[Row], tokenizer: Any, *, size: int) -> Iterator[PromptBatch]:
    """Yields batches of prompts of similar length, which need little padding."""
    dataset = Dataset.from_list(list(rows))
    prompts = prepare_prompts(
        dataset, tokenizer, query_len=QUERY_LEN, form=PromptForm(prompt_template=PROMPT_TEMPLATE), overlong="error"
    )
    items = [prompts[i] for i in range(len(prompts))]
    order = sorted(range(len(items)), key=lambda i: len(items[i]["input_ids"]))
    for start in range(0, len(order), size):
        indices = order[start : start + size]
        chosen = [items[i] for i in indices]
        yield collate_prompts(chosen, indices, pad_token_id=tokenizer.pad_token_id, query_len=QUERY_LEN)


@torch.no_grad()
def _logprobs(policy: Policy, batch: PromptBatch, responses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the log-probs (B * n, R) under `policy` of `responses`, n for each prompt of `batch`."""
    samples = len(responses) // len(batch["queries"])
    queries, masks = (batch[key].repeat_interleave(samples, dim=0) for key in ("queries", "query_attn_masks"))
    return policy(queries, masks, responses, mask, temperature=1.0, chunk_size=4096).logprobs
