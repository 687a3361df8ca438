"""Dynamic sampling: prompts whose responses all have the same score are replaced by fresh ones (DAPO,
arXiv:2503.14476).

Every rank has the rollouts of all ranks, so all of them decide the same without a collective operation. Which prompts
are drawn is in `data.schedule`; how they are sampled and scored is not here.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data.schedule import StepPrompts
from alpaca_ppo.functional import informative_rows
from alpaca_ppo.registry import ADV_ESTIMATORS
from alpaca_ppo.types import Rollouts


def informative(rollouts: Rollouts, args: PPOConfig) -> Tensor:
    """(B,) bool: whether the raw scores of the responses to the row's prompt differ: their sums (`scores`), or, for an
    estimator that compares each source, the scores of a source whose weight is not 0.
    """
    ids = rollouts["prompt_ids"]
    trained = rollouts.get("trained_rows", torch.ones_like(ids, dtype=torch.bool))
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
    """The global rollouts of a step in which prompts without information are replaced, round by round, and the metrics
    of what was drawn.

    Each prompt that is not `informative` gives its place in the batch to a fresh prompt. A fresh prompt is never one
    that is in the batch as an informative one; it may be one that was replaced in an earlier round, if the dataset is
    that small. After the last round, uninformative prompts stay in the batch, so that a step has as many rows as
    without dynamic sampling, and the run as many optimizer steps. A fresh prompt all of whose rewards failed replaces
    nothing.

    Args:
        rollouts: of the step's own prompts, of all ranks, as `rollout` returned them.
        prompts: draws fresh ones; moved on.
        rollout: returns the global rollouts of dataset indices; also called with the number of the round, from 1.
        args: of the run.
    """
    counts = dict.fromkeys(("objective/sampling_rounds", "objective/redrawn_prompts", "tokens/discarded"), 0.0)
    for sampling_round in range(1, args.dynamic_sampling + 1):
        differ = informative(rollouts, args)
        uninformative = list(_rows_by_prompt(rollouts["prompt_ids"][~differ]))
        kept = list(_rows_by_prompt(rollouts["prompt_ids"][differ]))
        fresh = prompts.draw(len(uninformative), without=kept)
        if not fresh:
            break
        counts["objective/sampling_rounds"] += 1
        counts["objective/redrawn_prompts"] += len(fresh)
        new = rollout(fresh, sampling_round)
        if "trained_rows" in new:
            scored = torch.isin(new["prompt_ids"], new["prompt_ids"][new["trained_rows"]])
            new = {key: value[scored] for key, value in new.items()}  # type: ignore
        rollouts, discarded = _replace(rollouts, new, dict(zip(uninformative, fresh, strict=False)))
        counts["tokens/discarded"] += discarded
    left = rollouts["prompt_ids"][~informative(rollouts, args)].unique()
    counts["objective/uninformative_prompts"] = float(len(left))
    counts["objective/extra_prompts"] = float(prompts.extra_prompts)
    return rollouts, counts


def _rows_by_prompt(prompt_ids: Tensor) -> dict[int, list[int]]:
    """The rows of each prompt, in the order in which the prompts come first."""
    rows: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompt_ids.tolist()):
        rows.setdefault(prompt, []).append(row)
    return rows


def _replace(rollouts: Rollouts, new: Rollouts, fresh: dict[int, int]) -> tuple[Rollouts, int]:
    """`rollouts` with the rows of each prompt of `fresh` replaced by those of its value in `new`, if it has any, and
    the number of tokens that were left out.
    """
    count, new_rows = len(rollouts["prompt_ids"]), _rows_by_prompt(new["prompt_ids"])
    rows: list[int] = []
    for prompt, own in _rows_by_prompt(rollouts["prompt_ids"]).items():
        if fresh.get(prompt) in new_rows:
            rows += [count + row for row in new_rows[fresh[prompt]]]
        elif prompt not in new_rows:
            # Otherwise it was drawn again, for the place of another prompt.
            rows += own
    every: dict[str, Tensor] = {key: torch.cat([value, new[key]]) for key, value in rollouts.items()}  # type: ignore
    discarded = sorted(set(range(len(every["prompt_ids"]))) - set(rows))
    merged: Rollouts = {key: value[rows] for key, value in every.items()}  # type: ignore[assignment]
    return merged, int(every["response_mask"][discarded].sum())
