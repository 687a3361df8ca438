"""From sampled responses to rewards: decode the text, call the reward sources, apply the penalties for a missing stop
and for length.

The KL penalty is not here; it is added when rewards are shaped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alpaca_ppo.functional.shaping import last_token_index, overlong_penalty, sequence_scores
from alpaca_ppo.rewards.scorer import RewardScorer


@dataclass(frozen=True)
class Penalties:
    """What is taken from scores for how a response ends."""

    missing_stop: float | None = None
    """Replaces the reward of a response that did not stop: a per-token reward becomes zero everywhere except at the
    last chosen token, which gets the penalty. None keeps the reward."""
    overlong_buffer_len: int | None = None
    """Tokens before the longest response over which a penalty grows that is added to the reward (of the last chosen
    token), also to a `missing_stop`. The length of a response is the number of chosen tokens. None adds nothing."""
    overlong_factor: float = 1.0
    """That penalty for a response of as many tokens as there are columns, in reward units."""


def score_responses(
    scorer: RewardScorer,
    processing_class: Any,
    samples: dict[str, Tensor],
    rows: list[dict[str, Any]],
    *,
    penalties: Penalties,
) -> dict[str, Tensor]:
    """Returns `scores`, `rewards` and `scores_by_source` of B sampled responses, on the CPU.

    Sources see the chosen tokens only, those under `response_mask`. A per-token reward goes to the column of its token,
    so `response_mask` may have holes (tokens that the policy did not choose, such as the output of a tool).

    Args:
        scorer: the reward sources.
        processing_class: the policy's tokenizer. The sources get text without special tokens.
        samples: `responses` (B, R) int64, `response_mask` (B, R) bool (True = chosen by the policy) and `stopped` (B,)
            bool, on the CPU; other keys are ignored.
        rows: the dataset row of each of the B responses, with its `prompt`.
        penalties: for a missing stop token and for length.

    Returns:
        scores (B,) float32, summed over the sources, before the penalties; rewards (B,) float32, or (B, R) if a source
        scores tokens, zero outside `response_mask`; scores_by_source (B, sources) float32, NaN if a source returned
        None. With a penalty for length also overlong_penalties (B,) float32, at most 0, which the rewards include. If
        the scorer's policy masks rows, also trained_rows (B,) bool, False = the reward failed and is 0.

    Raises:
        RewardError: as `RewardScorer`.
    """
    mask = samples["response_mask"]
    result = scorer(**scorer_arguments(processing_class, samples, rows))
    rewards = result.rewards if result.rewards.dim() == 1 else _to_columns(result.rewards, mask)
    scores = sequence_scores(rewards)
    if penalties.missing_stop is not None:
        penalized = _on_responses(torch.full_like(scores, penalties.missing_stop), rewards, mask)
        stopped = samples["stopped"] if rewards.dim() == 1 else samples["stopped"].unsqueeze(1)
        rewards = torch.where(stopped, rewards, penalized)
    by_source = torch.stack(list(result.by_source.values()), dim=1)
    scored = {"scores": scores, "rewards": rewards, "scores_by_source": by_source}
    if (buffer_len := penalties.overlong_buffer_len) is not None:
        scored["overlong_penalties"] = overlong_penalty(
            mask.sum(dim=1), max_len=mask.size(1), buffer_len=buffer_len, factor=penalties.overlong_factor
        )
        scored["rewards"] = rewards + _on_responses(scored["overlong_penalties"], rewards, mask)
    if scorer.policy.mask:
        scored["trained_rows"] = torch.tensor([row not in result.failures for row in range(len(rows))])
    return scored


def response_texts(processing_class: Any, samples: Mapping[str, Any]) -> tuple[list[list[int]], list[str]]:
    """Returns the chosen tokens of each response, and their text without special tokens."""
    ids = [row[keep].tolist() for row, keep in zip(samples["responses"], samples["response_mask"], strict=True)]
    # transformers 5 takes an empty list for one text without tokens.
    if not ids:
        return [], []
    return ids, processing_class.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def scorer_arguments(processing_class: Any, samples: Mapping[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The arguments of `RewardScorer`."""
    ids, texts = response_texts(processing_class, samples)
    return {"prompts": [row["prompt"] for row in rows], "completions": texts, "completion_ids": ids, "rows": rows}


def _to_columns(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """Returns (B, R): entry k of a row of `token_rewards` (B, T), in the column of that row's k-th True in `mask`."""
    is_token = torch.arange(token_rewards.size(1)) < mask.sum(dim=1, keepdim=True)
    rewards = token_rewards.new_zeros(mask.shape)
    rewards[mask] = token_rewards[is_token]
    return rewards


def _on_responses(values: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    """`values` (B,) in the shape of `rewards`: on the last chosen token of each response, if these are per token."""
    if rewards.dim() == 1:
        return values
    is_last = torch.arange(mask.size(1)) == last_token_index(mask).unsqueeze(1)
    return torch.where(is_last, values.unsqueeze(1), torch.zeros_like(rewards))
