"""Which responses are learned from. A response whose reward failed (`failed_rewards: mask`), or that this left without
another one to compare it with, stays in the rollouts: it gives no gradient, and is left out of whitening, groups and
denominators (`rollouts["trained_rows"]`). A response that was cut off (`mask_truncated`) only gives no gradient.

Without these options, `trained_rows` is absent and every response is learned from.
"""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.collectives import any_rank, gather_list
from alpaca_ppo.ppo import hook_checks
from alpaca_ppo.rewards.batch import RowFailure
from alpaca_ppo.types import Rollouts

_MAX_SHOWN = 8


def trained_rows(rollouts: Rollouts, args: PPOConfig) -> Tensor:
    """(B,) bool, True = the response gives a gradient."""
    rows = rollouts.get("trained_rows")
    if rows is None:
        rows = torch.ones(len(rollouts["response_mask"]), dtype=torch.bool)
    return rows & rollouts["stopped"] if args.mask_truncated else rows


def trained_mask(rollouts: Rollouts, args: PPOConfig) -> Tensor:
    """(B, R) bool, True = a token that gives a gradient."""
    return rollouts["response_mask"] & trained_rows(rollouts, args).unsqueeze(1)


def compared_mask(rollouts: Rollouts) -> Tensor:
    """(B, R) bool: the tokens from which advantages are estimated, those of responses that were cut off among them."""
    mask, rows = rollouts["response_mask"], rollouts.get("trained_rows")
    return mask if rows is None else mask & rows.unsqueeze(1)


def with_reward(rollouts: Rollouts) -> Rollouts:
    """The rollouts without the responses that `trained_rows` leaves out."""
    rows = rollouts.get("trained_rows")
    return rollouts if rows is None else {key: value[rows] for key, value in rollouts.items()}  # type: ignore


def add_baseline(rows: dict[str, Tensor], greedy: dict[str, Tensor], baseline_scores: Tensor) -> None:
    """Adds the scores (prompts,) of the greedy responses to the rows of the samples, which are not trained without.

    Args:
        rows: the samples, changed in place; each prompt has the same number of rows, next to one another.
        greedy: the greedy responses, one for each prompt.
        baseline_scores: (prompts,), of the greedy responses.
    """
    n = rows["responses"].size(0) // len(baseline_scores)
    rows["baseline_scores"] = baseline_scores.repeat_interleave(n)
    if "trained_rows" in rows:
        rows["trained_rows"] = rows["trained_rows"] & greedy["trained_rows"].repeat_interleave(n)


def shape_as_on_others(rows: dict[str, Tensor] | None, accelerator: Accelerator) -> dict[str, Tensor] | None:
    """`rows` with rewards (B, R) if another rank has such: one whose rewards all failed has scored no tokens.

    Every rank must call it.
    """
    per_token = bool(rows) and rows["rewards"].dim() == 2  # type: ignore[index]
    others_per_token = any_rank(per_token, accelerator)
    if not rows or per_token or not others_per_token or bool(rows["trained_rows"].any()):
        return rows
    return {**rows, "rewards": hook_checks.per_token(rows["rewards"], rows["response_mask"])}


def leave_out_failures(
    rollouts: Rollouts,
    failures: Sequence[RowFailure],
    accelerator: Accelerator,
    *,
    compares_group: bool,
    may_fail: bool,
) -> str:
    """Takes the responses out of the global `trained_rows` that have a reward but, of several to their prompt, are the
    only ones with one, if the estimator `compares_group`: their advantage would be their bare score. Every rank must
    call it.

    Args:
        rollouts: changed in place.
        failures: of this rank's rewards.
        accelerator: of the run.
        compares_group: whether responses to a prompt are compared.
        may_fail: whether all rewards may have failed.

    Returns:
        what to report: how many responses are not trained, and why; empty if all are.

    Raises:
        ValueError: on every rank, if no response is left, unless `may_fail`; this rank's first failure if it has one.
    """
    rows, alone = rollouts["trained_rows"], torch.zeros_like(rollouts["trained_rows"])
    if compares_group:
        _, group = torch.unique(rollouts["prompt_ids"], return_inverse=True)
        member = rows & rollouts["response_mask"].any(dim=1)
        members, failed = (torch.bincount(group[some], minlength=len(group))[group] for some in (member, ~rows))
        alone = member & (members == 1) & (failed > 0)
    rollouts["trained_rows"] = rows & ~alone
    own = [str(failure) for failure in failures[:_MAX_SHOWN]]
    errors = [error for of_rank in gather_list(own, accelerator) for error in of_rank]
    num_failed, num_alone = int((~rows).sum()), int(alone.sum())
    if not num_failed:
        return ""
    left = f", and {num_alone} because no other response to their prompt has a reward" if num_alone else ""
    shown = "\n".join(f"- {error}" for error in errors[:_MAX_SHOWN])
    text = f"{num_failed} of {len(rows)} responses give no gradient because their reward failed{left}:\n{shown}"
    if num_failed > _MAX_SHOWN:
        text += f"\nand {num_failed - _MAX_SHOWN} more"
    if may_fail or bool(rollouts["trained_rows"].any()):
        return text
    raise failures[0] if failures else ValueError(text)
