"""From sampled responses to their scores: decoded, given to the reward sources, penalised where they did not stop."""

from typing import Any

import torch
from torch import Tensor

from alpaca_ppo.functional.shaping import sequence_scores
from alpaca_ppo.rewards import RewardScorer


def score_responses(
    scorer: RewardScorer,
    processing_class: Any,
    samples: dict[str, Tensor],
    rows: list[dict[str, Any]],
    *,
    penalty: float | None,
) -> dict[str, Tensor]:
    """`scores` (B,), `rewards` (B,) or (B, R), and `scores_by_source` (B, sources) of sampled responses.

    Args:
        scorer: the reward sources.
        processing_class: the policy's tokenizer; special tokens do not reach the sources' text.
        samples: what `sample_responses` returned.
        rows: the dataset row of each of the B responses.
        penalty: takes the place of the score of a response that did not stop; None = keep the score.
    """
    mask = samples["response_mask"]
    ids = [row[keep].tolist() for row, keep in zip(samples["responses"], mask, strict=True)]
    texts = processing_class.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    result = scorer(prompts=[row["prompt"] for row in rows], completions=texts, completion_ids=ids, rows=rows)
    rewards = result.rewards
    if rewards.dim() == 2:
        rewards = torch.nn.functional.pad(rewards, (0, mask.size(1) - rewards.size(1)))
    scores = sequence_scores(rewards)
    if penalty is not None:
        rewards = _penalise(rewards, mask, ~samples["stopped"], penalty)
    by_source = torch.stack(list(result.by_source.values()), dim=1)
    return {"scores": scores, "rewards": rewards, "scores_by_source": by_source}


def _penalise(rewards: Tensor, mask: Tensor, unstopped: Tensor, penalty: float) -> Tensor:
    if rewards.dim() == 1:
        return torch.where(unstopped, penalty, rewards)
    last = mask.size(1) - 1 - mask.flip(1).long().argmax(dim=1)
    whole = torch.zeros_like(rewards).scatter_(1, last.unsqueeze(1), penalty)
    return torch.where(unstopped.unsqueeze(1), whole, rewards)
