"""The table of results: supervised model, best-of-n and PPO, scored by the reward model and by the annotators."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from examples.mini_farm.annotators import gold_score, win_rate
from examples.mini_farm.sampling import Answer, proxy_rewards, sample_answers
from examples.mini_farm.splits import Row, prompt_of, write_rows


@dataclass(frozen=True)
class Summary:
    """One line of the table: the means over one answer to each held-out instruction."""

    method: str
    proxy: float
    """The reward model's mean score."""
    gold: float
    """The annotators' mean score."""
    gold_error: float
    """Its standard error."""
    win_rate: float
    """Fraction of the annotators that prefer the answer to the supervised model's; a tie counts half."""
    gain_errors: float
    """Mean gain in gold score over the supervised model, in standard errors of the paired difference."""
    words: float
    """Mean length in words."""
    kl: float
    """KL to the supervised model, in nats per answer."""


def best_of_n_kl(samples: int) -> float:
    """Returns an upper bound of KL(best of n || policy): log n - (n - 1) / n (Stiennon et al., arXiv:2009.01325)."""
    return math.log(samples) - (samples - 1) / samples


def answer_rows(rows: Sequence[Row], answers: Sequence[Answer], proxies: Sequence[float]) -> list[Row]:
    """Returns a record for each answer, to be read and for `summarize`."""
    return [
        {
            "prompt": prompt_of(row),
            "answer": answer.text,
            "proxy": proxy,
            "gold": gold_score(answer.text, row),
            "words": len(answer.text.split()),
            "kl": answer.kl,
        }
        for row, answer, proxy in zip(rows, answers, proxies, strict=True)
    ]


def evaluate_sft(folder: Path, sft: Path, reward_model: Path, rows: Sequence[Row], *, best_of: int, seed: int) -> None:
    """Writes sft.jsonl, the first of `best_of` samples for each row, and best_of_n.jsonl, the sample of best proxy."""
    samples = sample_answers(sft, rows, samples=best_of, seed=seed)
    repeated = [row for row in rows for _ in range(best_of)]
    flat = proxy_rewards(reward_model, repeated, [answer.text for group in samples for answer in group])
    proxies = [flat[start : start + best_of] for start in range(0, len(flat), best_of)]
    best = [max(range(best_of), key=scores.__getitem__) for scores in proxies]
    bound = best_of_n_kl(best_of)
    chosen = [Answer(group[i].text, bound) for group, i in zip(samples, best, strict=True)]
    first = [group[0] for group in samples]
    write_rows(folder / "sft.jsonl", answer_rows(rows, first, [scores[0] for scores in proxies]))
    write_rows(folder / "best_of_n.jsonl", answer_rows(rows, chosen, [max(scores) for scores in proxies]))


def evaluate_policy(
    folder: Path, policy: Path, sft: Path, reward_model: Path, rows: Sequence[Row], *, seed: int
) -> None:
    """Writes policy.jsonl, one sample for each row."""
    answers = [group[0] for group in sample_answers(policy, rows, samples=1, seed=seed, reference_folder=sft)]
    proxies = proxy_rewards(reward_model, rows, [answer.text for answer in answers])
    write_rows(folder / "policy.jsonl", answer_rows(rows, answers, proxies))


def summarize(method: str, answers: Sequence[Row], baseline: Sequence[Row], rows: Sequence[Row]) -> Summary:
    """Returns the table's line for `answers`; `baseline` are the supervised model's answers to the same rows."""
    gold = [answer["gold"] for answer in answers]
    gains = [answer["gold"] - other["gold"] for answer, other in zip(answers, baseline, strict=True)]
    wins = [
        win_rate(answer["answer"], other["answer"], row)
        for answer, other, row in zip(answers, baseline, rows, strict=True)
    ]
    return Summary(
        method=method,
        proxy=fmean(answer["proxy"] for answer in answers),
        gold=fmean(gold),
        gold_error=standard_error(gold),
        win_rate=fmean(wins),
        gain_errors=fmean(gains) / standard_error(gains) if any(gains) else 0.0,
        words=fmean(answer["words"] for answer in answers),
        kl=fmean(answer["kl"] for answer in answers),
    )


def standard_error(numbers: Sequence[float]) -> float:
    """Returns the standard error of the mean of at least two independent `numbers`."""
    return stdev(numbers) / math.sqrt(len(numbers))


def table(summaries: Sequence[Summary]) -> str:
    """Returns the summaries as an aligned Markdown table."""
    header = ("method", "proxy reward", "gold score", "win-rate over SFT", "gain / s.e.", "words", "KL to SFT (nats)")
    cells = [
        (
            line.method,
            f"{line.proxy:.2f}",
            f"{line.gold:.2f} ± {line.gold_error:.2f}",
            f"{100 * line.win_rate:.1f} %",
            f"{line.gain_errors:.1f}",
            f"{line.words:.1f}",
            f"{line.kl:.2f}",
        )
        for line in summaries
    ]
    widths = [max(len(row[i]) for row in [header, *cells]) for i in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [header, *cells]
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
