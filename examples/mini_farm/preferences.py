"""Preference pairs: two different answers of the supervised model to each instruction, one of them preferred."""

import random
from collections.abc import Sequence
from pathlib import Path

from examples.mini_farm.annotators import gold_score, prefers_first
from examples.mini_farm.sampling import proxy_rewards, sample_answers
from examples.mini_farm.splits import Row


def collect_pairs(sft_folder: Path, rows: Sequence[Row], *, seed: int) -> list[Row]:
    """Returns `rows` with the columns `chosen` and `rejected`; rows whose two answers are equal are left out."""
    rng = random.Random(seed)
    pairs = []
    for row, answers in zip(rows, sample_answers(sft_folder, rows, samples=2, seed=seed), strict=True):
        first, second = (answer.text for answer in answers)
        if first != second:
            chosen, rejected = (first, second) if prefers_first(first, second, row, rng) else (second, first)
            pairs.append(row | {"chosen": chosen, "rejected": rejected})
    return pairs


def agreement(reward_folder: Path, pairs: Sequence[Row]) -> dict[str, float]:
    """Returns how often the reward model and the noisy labels agree with the gold score on `pairs`."""
    chosen, rejected = (
        proxy_rewards(reward_folder, pairs, [pair[side] for pair in pairs]) for side in ("chosen", "rejected")
    )
    margins = [gold_score(pair["chosen"], pair) - gold_score(pair["rejected"], pair) for pair in pairs]
    judged = [(margin > 0, good > bad) for margin, good, bad in zip(margins, chosen, rejected, strict=True) if margin]
    return {
        "pairs": float(len(judged)),
        "labels_agree_with_gold": sum(label for label, _ in judged) / len(judged),
        "reward_model_agrees_with_gold": sum(label == model for label, model in judged) / len(judged),
    }
