"""Dynamic sampling: replaces prompts whose responses all have the same score by fresh ones (DAPO, arXiv:2503.14476).

Every rank has the rollouts of all ranks, so all decide the same without a collective operation. `data.schedule` draws
the prompts.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data.schedule import StepPrompts
from alpaca_ppo.functional import informative_rows
from alpaca_ppo.ppo.row_masks import select_rows, trained_rows
from alpaca_ppo.registry import ADV_ESTIMATORS
from alpaca_ppo.types import Rollouts


def informative(rollouts: Rollouts, args: PPOConfig) -> Tensor:
    """(B,) bool, True = the responses to the row's prompt differ in `scores` or, for an estimator that compares each
    source separately, in the scores of a source whose weight is not 0.
    """
    ids = rollouts["prompt_ids"]
    trained = trained_rows(rollouts)
    columns, weights = [rollouts["scores"]], [1.0]
    if ADV_ESTIMATORS.trait(args.adv_estimator, "needs_scores_by_source"):
        columns = list(rollouts["scores_by_source"].unbind(dim=1))
        weights = args.reward_weights or [1.0] * len(columns)
    differ = torch.zeros_like(trained)
    for weight, scores in zip(weights, columns, strict=True):
        scored = trained & ~scores.isnan()
        prompts = ids[scored][informative_rows(scores[scored], ids[scored])]
        differ |= torch.isin(ids, prompts) & (weight != 0)
    return differ


def replace_uninformative(
    rollouts: Rollouts, prompts: StepPrompts, rollout: Callable[[list[int], int], Rollouts], *, args: PPOConfig
) -> tuple[Rollouts, dict[str, float]]:
    """Replaces prompts that are not `informative` by fresh ones, in at most `dynamic_sampling` rounds; returns the
    rollouts and the metrics of the sampling.

    No informative prompt of the batch is drawn again; in a small dataset, a prompt that was replaced may be. A fresh
    prompt whose rewards all failed replaces nothing. Prompts that are uninformative after the last round stay, so that
    steps have as many rows as without dynamic sampling.

    Args:
        rollouts: of the step's scheduled prompts, of all ranks.
        prompts: draws fresh prompts, which it counts.
        rollout: from dataset indices and the number of the round (from 1) to global rollouts.
    """
    counts = dict.fromkeys(("objective/sampling_rounds", "objective/redrawn_prompts", "tokens/discarded"), 0.0)
    for sampling_round in range(1, args.dynamic_sampling + 1):
        differ = informative(rollouts, args)
        uninformative = _distinct(rollouts["prompt_ids"][~differ])
        fresh = prompts.draw(len(uninformative), without=_distinct(rollouts["prompt_ids"][differ]))
        if not fresh:
            break
        counts["objective/sampling_rounds"] += 1
        counts["objective/redrawn_prompts"] += len(fresh)
        new = rollout(fresh, sampling_round)
        if "trained_rows" in new:
            scored_prompts = new["prompt_ids"][new["trained_rows"]]
            new = select_rows(new, torch.isin(new["prompt_ids"], scored_prompts))
        rollouts, discarded = _replace(rollouts, new, dict(zip(uninformative, fresh, strict=False)))
        counts["tokens/discarded"] += discarded
    left = rollouts["prompt_ids"][~informative(rollouts, args)].unique()
    counts["objective/uninformative_prompts"] = float(len(left))
    counts["objective/extra_prompts"] = float(prompts.extra_prompts)
    return rollouts, counts


def _distinct(prompt_ids: Tensor) -> list[int]:
    return list(dict.fromkeys(prompt_ids.tolist()))


def _rows_by_prompt(prompt_ids: Tensor) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompt_ids.tolist()):
        rows.setdefault(prompt, []).append(row)
    return rows


def _replace(rollouts: Rollouts, new: Rollouts, replacements: dict[int, int]) -> tuple[Rollouts, int]:
    """`rollouts` with each prompt of `replacements` replaced by its fresh prompt if that has rows in `new`, and the
    number of discarded tokens.
    """
    num_rows = len(rollouts["prompt_ids"])
    old_rows, new_rows = _rows_by_prompt(rollouts["prompt_ids"]), _rows_by_prompt(new["prompt_ids"])
    replaced = {fresh: prompt for prompt, fresh in replacements.items()}
    kept: list[int] = []
    for place in old_rows:
        if replacements.get(place) in new_rows:
            kept += [num_rows + row for row in new_rows[replacements[place]]]
        else:
            stays = place
            # A prompt that was drawn again, in the place of another one, leaves its own place to that one.
            while stays in new_rows:
                stays = replaced[stays]
            kept += old_rows[stays]
    joined: Rollouts = {key: torch.cat([value, new[key]]) for key, value in rollouts.items()}  # type: ignore
    merged = select_rows(joined, kept)
    return merged, int(joined["response_mask"].sum() - merged["response_mask"].sum())
